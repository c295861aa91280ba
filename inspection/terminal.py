"""Show heads in a terminal: token labels, tables, and one head drawn in characters."""

import math
import unicodedata
from collections.abc import Callable, Sequence

from torch import Tensor

from inspection.kinds import KINDS, Head, Heads, by_kind, name_of, short
from inspection.metrics import METRICS, HeadScores
from inspection.views import Said

GREY = " .:-=+*#%@"  # darker for a larger weight, in tenths
VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}
WIDTH = 80  # columns of a terminal
MOST_ROWS = 16  # heads in a table, unless more are asked for


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


def table(scores: HeadScores, heads: Heads, label_of: Callable[[int], str]) -> str:
    """Format one line for each head, and one for a head that attends evenly; more if their masks differ.

    After ablation over several texts the rise of the loss has its standard error.

    label_of: names a token, for the metric "token". After ablation there is no room for it.
    """
    chance = scores.chance
    mean = scores.mean
    error = scores.error
    left_out = "token" if "ablation" in mean else ""
    columns = [name for name in METRICS if name in mean and name != left_out]
    rows = [["head", *(METRICS[name][0] for name in columns)]]
    for head in heads:
        cells = {name: number(mean[name][head], METRICS[name][1]) for name in columns}
        if "token" in cells:
            by_chance = number(chance["token"][head], ".2f")
            cells["token"] = f"{label_of(scores.tokens[head].item()):.10} {cells['token']} ({by_chance})"
        if "ablation" in cells and not error["ablation"][head].isnan():
            cells["ablation"] += f" ± {error['ablation'][head]:.4f}"
        rows.append([name_of(head), *cells.values()])
    for head in heads:
        cells = {name: number(chance[name][head], METRICS[name][1]) for name in chance if name != "token"}
        rows.append(["even", *(cells.get(name, "") for name in columns)])
    rows = dict.fromkeys(map(tuple, rows))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "even: a head that attends evenly; inspect_attention.py --help defines columns"])


def best(scores: HeadScores, heads: Heads) -> list[Head]:
    """Choose heads for a shorter table: the best two of each kind, after --ablate those that the loss needs most."""
    if "ablation" in scores.mean:
        rise = scores.mean["ablation"]
        return sorted(heads, key=lambda head: -rise[head])[:MOST_ROWS]
    return [head for group in by_kind(scores, heads).values() for head, _ in group[:2]]


def in_words(scores: HeadScores, heads: Heads, label_of: Callable[[int], str]) -> str:
    """Format one line for each kind: the number of its heads, and as many of the highest scores as fit, up to three.

    label_of: as in `table`.
    """
    lines = ["heads by where they look, each with its score (and that of an even head)"]
    for name, group in by_kind(scores, heads).items():
        line = f"{len(group):4d}  {KINDS[name]}"
        named = []
        for head, kind in group[:3]:
            token = f" {label_of(scores.tokens[head].item()):.8}" if name == "token" else ""
            named.append(f"{name_of(head)}{token} {short(kind.score)} ({short(kind.chance)})")
        while len(", ".join([line, *named, "..."])) > WIDTH:
            named.pop()
        if len(group) > len(named):
            named.append("...")
        lines.append(line if name == "other" else f"{line}: {', '.join(named)}")
    return "\n".join(lines)


def number(value: Tensor, form: str) -> str:
    """Format a number of the table; empty if it was not measured."""
    return "" if value.isnan() else format(value.item(), form)


def grid_columns(heads: Heads) -> int:
    """Choose the number of columns of a grid: a row for each layer if all layers have the same heads, else a square."""
    num_layers, columns = (len(set(numbers)) for numbers in zip(*heads, strict=True))
    return columns if num_layers * columns == len(heads) else math.ceil(math.sqrt(len(heads)))


def triangle(pattern: Tensor, labels: Sequence[str], width: int) -> str:
    """Draw one head, (T, T), in characters: a line for each query with its token, a character for each key.

    labels: of the T tokens; width: the columns of the terminal.

    Returns a sentence if the tokens do not fit.
    """
    if len(labels) > width - 22:
        tokens = f"{len(labels)} tokens do not fit {width} columns"
        return f"({tokens}: give a shorter --text, or write a picture, with -o)"
    lines = []
    for row, name in enumerate(labels):
        characters = "".join(GREY[min(9, int(10 * weight))] for weight in pattern[row, : row + 1].tolist())
        lines.append(f"{row:4d} {name[:16]:>16} {characters}".rstrip())
    return "\n".join(lines)


def cut(text: str, most: int) -> str:
    """Shorten a text to so many characters, the last of which says so."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def sayings(said: Said, labels: Sequence[str], label_of: Callable[[int], str]) -> str:
    """Format two lines for each token of a text: what a head makes likelier after it, and what it makes unlikelier."""
    lines = []
    for row, (name, tokens, logits) in enumerate(zip(labels, *said, strict=True)):
        parts = zip(tokens.tolist(), logits.tolist(), strict=True)
        words = [f"{cut(label_of(token), 5)} {logit:+.1f}".ljust(11) for token, logit in parts]
        if logits.isnan().any():
            words = ["was not", "computed"]
        half = len(words) // 2
        lines.append(f"{row:4d} {name[:11]:>11} {'  '.join(words[:half])}".rstrip())
        lines.append(f"{'':17}{'  '.join(words[half:])}".rstrip())
    return "\n".join(lines)
