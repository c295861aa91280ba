"""Show heads in a terminal: token labels, the table of heads, and one head drawn in characters."""

import math
import unicodedata
from collections.abc import Sequence

from torch import Tensor

from inspection.heads import HeadScores
from inspection.metrics import BY_DISTANCE

Head = tuple[int, int]  # layer and head, both from zero
GREY = " .:-=+*#%@"
VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}
COLUMNS = {  # of the table: metric -> title and format
    "entropy": ("entropy", ".2f"),
    "distance": ("distance", ".1f"),
    "sink": ("sink", ".2f"),
    "current": ("self", ".2f"),
    "previous": ("prev", ".2f"),
    "duplicate": ("dup", ".2f"),
    "induction": ("ind", ".2f"),
    "induction_control": ("(ctrl)", ".2f"),
    "max_logit": ("logit", ".1f"),
    "ablation": ("loss", "+.4f"),
}
KINDS = ("sink", "previous", "duplicate", "induction")  # metrics that can name a head, if one is at least MUCH
MUCH = 0.2
LEGEND = (
    "near > far: attention to itself, 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64, more tokens\n"
    f"back, and to the first; characters from 0 to 1: '{GREY}'"
)


def label(token: bytes) -> str:
    """Show a token with every character visible and no two tokens alike: `␣the`, `↵`, `⟨e2⟩` for part of a character.

    Characters that are invisible or could be mistaken are written as their code points, as in ⟨u+200b⟩.
    """
    shown = ""
    for character in token.decode(errors="surrogateescape"):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8
            shown += f"⟨{code - 0xDC00:02x}⟩"
        elif character in VISIBLE:
            shown += VISIBLE[character]
        elif not character.isprintable() or character in "␣↵⇥⟨⟩⟦⟧" or unicodedata.combining(character):
            shown += f"⟨u+{code:04x}⟩"
        else:
            shown += character
    return shown


def grey(weight: float) -> str:
    """Return a character that is darker for a larger weight, from 0 to 1."""
    return GREY[min(9, int(weight * 10))] if weight >= 0 else " "  # nan too


def table(scores: HeadScores, heads: list[Head], metric: str | None, width: int) -> str:
    """Format one line for each head, sorted by a metric, the largest first; None: in the order given.

    The last line has the largest standard error of each column. If the table is wider than `width`, the distances are
    left out, then the control.
    """
    mean, error = scores.mean, scores.error
    columns = {name: COLUMNS[name] for name in COLUMNS if name in mean}
    if metric:
        heads = sorted(heads, key=lambda head: -mean[metric][head].nan_to_num(-math.inf))
    titles = [f"{title}↓" if name == metric else title for name, (title, _) in columns.items()]
    rows, notes = [["head", "near > far", *titles]], ["the columns are defined in: inspect_attention.py --help"]
    for head in heads:
        cells = [number(mean[name][head], form) for name, (_, form) in columns.items()]
        if "ablation" in mean and not error["ablation"][head].isnan():
            cells[-1] += f" ± {error['ablation'][head]:.4f}"
        rows.append([name_of(head), "".join(map(grey, mean[BY_DISTANCE][head].tolist())), *cells])
    largest = {name: max(error[name][head] for head in heads) for name in columns}
    if not all(value.isnan() for value in largest.values()):
        rows.append(["s.e.≤", "", *(number(value, ".1g") for value in largest.values())])
        notes.append("s.e.≤: the largest standard error of a head in each column, over the texts")
    for title in ("near > far", "(ctrl)"):
        if len(aligned(rows)[0]) > width and title in rows[0]:
            rows = [[cell for cell, name in zip(row, rows[0], strict=True) if name != title] for row in rows]
    legend = [LEGEND] if "near > far" in rows[0] else []
    return "\n".join([*aligned(rows), *legend, *notes])


def kind(mean: dict[str, Tensor], head: Head) -> str:
    """Name a head by its largest metric of KINDS, as "prev .81"; empty if that is less than MUCH."""
    found = {name: mean[name][head].nan_to_num(0).item() for name in KINDS if name in mean}
    name = max(found, key=found.get)
    return f"{COLUMNS[name][0]} {found[name]:.2f}".replace(" 0.", " .") if found[name] >= MUCH else ""


def number(value: Tensor, form: str) -> str:
    """Format a number of the table; empty if it was not measured."""
    return "" if value.isnan() else format(value.item(), form)


def aligned(rows: list[list[str]]) -> list[str]:
    """Join cells to lines, with each column aligned on the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def name_of(head: Head) -> str:
    """(5, 1) -> "5.1"."""
    return f"{head[0]}.{head[1]}"


def grid_columns(heads: Sequence[Head]) -> int:
    """Choose the columns of a grid of pictures: a row for each layer if all have the same heads, else a square."""
    layers, columns = (len(set(numbers)) for numbers in zip(*heads, strict=True))
    return columns if layers * columns == len(heads) else math.ceil(len(heads) ** 0.5)


def triangle(pattern: Tensor, labels: list[str], width: int) -> str:
    """Draw one head, (T, T), in characters: a line for each query with its token, a character for each key."""
    room = width - len(labels) - 6
    if room < 8:
        return f"(a picture of {len(labels)} tokens does not fit {width} columns: write it to a file, with -o)"
    lines = []
    label_width = min(room, 16)
    for row, name in enumerate(labels):
        characters = "".join(grey(weight) for weight in pattern[row, : row + 1].tolist())
        lines.append(f"{row:4d} {name[:label_width]:>{label_width}} {characters}".rstrip())
    return "\n".join(lines)
