"""Run the code of the pages in docs/, and write anew what it prints and the figures that are drawn from it.

    python docs/figures.py

The code goes into a Python console line by line, as if it were pasted there. Two figures are of trained models, which
these commands make again from their runs (the README says which those are):

    python inspect_attention.py out/shakespeare_char_cpu --ablate zero -o docs/heads.png
    python benchmarks/loss_curve.py out/quickstart out/shakespeare_char_cpu out/shakespeare_char_cpu_nanogpt_rate \
        out/shakespeare_char_fast docs/loss_curve.svg
"""

import io
import re
import sys
from code import InteractiveConsole
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from inspection.plots import blank, new_figure, save  # noqa: E402

BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<shown>.*?)```\n)?", re.DOTALL)


class Ran(NamedTuple):
    """A block of a page that was run."""

    line: int
    """Where it begins."""
    printed: str
    """What it printed."""
    shown: str
    """What the page says it prints."""


class Console(InteractiveConsole):
    """A console in which an error is not printed but raised."""

    def showtraceback(self) -> None:
        raise

    def showsyntaxerror(self, *arguments: object, **options: object) -> None:
        raise


def run_page(text: str) -> tuple[dict, list[Ran]]:
    """Run the Python of a page in one session: the names it leaves behind, and its blocks."""
    console, ran = Console(), []
    for block in BLOCK.finditer(text):
        with redirect_stdout(io.StringIO()) as printed:
            for line in [*block["code"].splitlines(), ""]:
                unfinished = console.push(line)
        line = text[: block.start()].count("\n") + 1
        if unfinished:
            raise SyntaxError(f"the block of line {line} ends in the middle of a statement")
        ran.append(Ran(line, printed.getvalue(), block["shown"] or ""))
    return console.locals, ran


def written_anew(text: str, ran: list[Ran]) -> str:
    """The page with what its blocks have printed."""
    printed: Iterator[str] = (block.printed for block in ran)

    def block(found: re.Match) -> str:
        shown = next(printed)
        return f"```python\n{found['code']}```\n" + (f"\n```text\n{shown}```\n" if shown else "")

    return BLOCK.sub(block, text)


def draw_scale(path: Path, names: dict) -> None:
    """The largest weight of a row for wider and wider heads, with and without the square root."""
    figure = new_figure(6, 3)
    ax = figure.subplots()
    widths = list(names["largest"])
    for column, label in enumerate(("scores as they are", "scores divided by √D")):
        ax.plot(widths, [names["largest"][D][column] for D in widths], marker="o", label=label)
    ax.set(xlabel="D, the width of a head", ylabel="mean of the largest weight", ylim=(0, 1))
    ax.set_xscale("log", base=2)
    ax.set_xticks(widths, widths)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    save(figure, path)


def draw_learned(path: Path, names: dict) -> None:
    """The weights of one head before and after it has learned to look at the token before."""
    figure = new_figure(7, 3.2)
    axes = figure.subplots(1, 2)
    for ax, title in zip(axes, ("before", "after"), strict=True):
        image = ax.imshow(blank(names[title]).numpy(), vmin=0, vmax=1, cmap="viridis")
        ax.set_title(f"{title} training", fontsize=10)
        ax.set(xlabel="key", ylabel="query", xticks=range(0, 12, 2), yticks=range(0, 12, 2))
        ax.spines[["top", "right"]].set_visible(False)
    figure.colorbar(image, ax=list(axes), shrink=0.8, label="weight")
    save(figure, path)


FIGURES = {"attention.md": {"scale.svg": draw_scale, "learned.svg": draw_learned}}


def main() -> None:
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        names, ran = run_page(text)
        page.write_text(written_anew(text, ran), encoding="utf-8")
        for figure, draw in FIGURES.get(page.name, {}).items():
            draw(DOCS / figure, names)


if __name__ == "__main__":
    main()
