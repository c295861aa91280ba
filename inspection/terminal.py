"""Show heads in a terminal: token labels, tables, and one head drawn in characters."""

import math
import unicodedata
from collections.abc import Callable, Sequence

from torch import Tensor

from inspection.heads import HeadScores
from inspection.kinds import KINDS, Head, Heads, by_kind, name_of, short
from inspection.metrics import METRICS, Metrics

GREY = " .:-=+*#%@"  # darker for a larger weight, in tenths
VISIBLE = {" ": "␣", "\n": "↵", "\t": "⇥"}
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
    """Format one line for each head. After ablation over several texts the rise of the loss has its standard error.

    label_of: names a token, for the metric "token". After ablation there is no room for it.
    """
    mean = scores.mean
    error = scores.error
    left_out = "token" if "ablation" in mean else ""
    columns = [name for name in METRICS if name in mean and name != left_out]
    rows = [["head", *(METRICS[name][0] for name in columns)]]
    for head in heads:
        cells = {name: number(mean[name][head], METRICS[name][1]) for name in columns}
        if "token" in cells:
            cells["token"] = f"{label_of(scores.tokens[head].item()):.10} {cells['token']}"
        if "ablation" in cells and not error["ablation"][head].isnan():
            cells["ablation"] += f" ± {error['ablation'][head]:.4f}"
        rows.append([name_of(head), *cells.values()])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "the columns are defined in: inspect_attention.py --help"])


def best(mean: Metrics, heads: Heads) -> list[Head]:
    """Choose heads for a shorter table: the best two of each kind, after --ablate the heads that the loss needs most.

    mean: metric -> (L, H).
    """
    if "ablation" in mean:
        return sorted(heads, key=lambda head: -mean["ablation"][head])[:MOST_ROWS]
    return [head for group in by_kind(mean, heads).values() for head, _ in group[:2]]


def in_words(scores: HeadScores, heads: Heads, label_of: Callable[[int], str]) -> str:
    """Format one line for each kind: the number of its heads, and up to three of the highest scores.

    label_of: as in `table`.
    """
    lines = ["heads by where they look"]
    for kind, group in by_kind(scores.mean, heads).items():
        surest = []
        for head, score in group[:3]:
            token = f" {label_of(scores.tokens[head].item()):.8}" if kind == "token" else ""
            surest.append(f"{name_of(head)}{token} {short(score)}")
        if len(group) > len(surest):
            surest.append("...")
        named = "" if kind == "other" else f": {', '.join(surest)}"
        lines.append(f"{len(group):4d}  {KINDS[kind]}{named}")
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

    labels: of the T tokens; width: the columns of the terminal. Returns a sentence if the tokens do not fit.
    """
    if len(labels) > width - 22:
        tokens = f"{len(labels)} tokens do not fit {width} columns"
        return f"({tokens}: give a shorter --text, or write a picture, with -o)"
    lines = []
    for row, name in enumerate(labels):
        characters = "".join(GREY[min(9, int(10 * weight))] for weight in pattern[row, : row + 1].tolist())
        lines.append(f"{row:4d} {name[:16]:>16} {characters}".rstrip())
    return "\n".join(lines)
