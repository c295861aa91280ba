"""Heads in a terminal: labels that show every character of a token, the table, and a head drawn in grey letters."""

import math
import unicodedata

from torch import Tensor

from inspection.heads import HeadScores
from inspection.metrics import PICTURE

Head = tuple[int, int]
GREY = " .:-=+*#%@"
SHOWN = {" ": "␣", "\n": "↵", "\t": "⇥"}
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
KINDS = ("sink", "previous", "duplicate", "induction")  # what a head may be, if it has much of it
MUCH = 0.2
LEGEND = (
    "near > far: attention to itself, 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64, more tokens\n"
    f"back, and to the first; letters from 0 to 1: '{GREY}'"
)
COLUMNS_NOTE = "what the columns are: inspect_attention.py --help"
ERROR_NOTE = "s.e.≤: the largest standard error of a head in each column, over the texts"


def label(token: bytes) -> str:
    """What a token stands for, every character visible, and no two tokens alike: `␣the`, `↵`, `⟨e2⟩` for half a letter.

    What could be taken for something else is spelled by its code point, as in ⟨u+200b⟩.
    """
    shown = ""
    for character in token.decode(errors="surrogateescape"):
        code = ord(character)
        if 0xDC80 <= code <= 0xDCFF:  # a byte that is no character
            shown += f"⟨{code - 0xDC00:02x}⟩"
        elif character in SHOWN:
            shown += SHOWN[character]
        elif not character.isprintable() or character in "␣↵⇥⟨⟩⟦⟧" or unicodedata.combining(character):
            shown += f"⟨u+{code:04x}⟩"
        else:
            shown += character
    return shown


def grey(weight: float) -> str:
    """A letter that is the darker the larger the weight, from 0 to 1."""
    return GREY[min(9, int(weight * 10))] if weight >= 0 else " "


def table(scores: HeadScores, heads: list[Head], sort: str, width: int) -> str:
    """One line a head, those with most of the column `sort` first; by "head" in the order given, by "auto" by what a
    head has most of among KINDS.

    The last line has the largest standard error of each column. What does not fit `width` is left out: the pictures,
    then the control.
    """
    mean, error = scores.mean, scores.error
    columns = {name: COLUMNS[name] for name in COLUMNS if name in mean}
    of_kinds = {name: max(mean[name][head].nan_to_num(-1) for head in heads) for name in KINDS if name in mean}
    by = {title: name for name, (title, _) in columns.items()} | {"auto": max(of_kinds, key=of_kinds.get), "head": None}
    if by[sort]:
        heads = sorted(heads, key=lambda head: -mean[by[sort]][head].nan_to_num(-math.inf))
    titles = [f"{title}↓" if name == by[sort] else title for name, (title, _) in columns.items()]
    rows, notes = [["head", "near > far", *titles]], [COLUMNS_NOTE]
    for head in heads:
        cells = [number(mean[name][head], form) for name, (_, form) in columns.items()]
        if "ablation" in mean and not error["ablation"][head].isnan():
            cells[-1] += f" ± {error['ablation'][head]:.4f}"
        rows.append([name_of(head), "".join(map(grey, mean[PICTURE][head].tolist())), *cells])
    largest = {name: max(error[name][head] for head in heads) for name in columns}
    if not all(value.isnan() for value in largest.values()):
        rows.append(["s.e.≤", "", *(number(value, ".1g") for value in largest.values())])
        notes.append(ERROR_NOTE)
    for title in ("near > far", "(ctrl)"):
        if len(aligned(rows)[0]) > width and title in rows[0]:
            rows = [[cell for cell, name in zip(row, rows[0], strict=True) if name != title] for row in rows]
    legend = [LEGEND] if "near > far" in rows[0] else []
    return "\n".join([*aligned(rows), *legend, *notes])


def kind(mean: dict[str, Tensor], head: Head) -> str:
    """What a head is known by, as "prev .81": the largest of KINDS; nothing if it has not much of any."""
    found = {name: mean[name][head].nan_to_num(0).item() for name in KINDS if name in mean}
    name = max(found, key=found.get)
    return f"{COLUMNS[name][0]} {found[name]:.2f}".replace(" 0.", " .") if found[name] >= MUCH else ""


def number(value: Tensor, form: str) -> str:
    """A number in a table; nothing if it was not measured."""
    return "" if value.isnan() else format(value.item(), form)


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of which all cells of a column end at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def name_of(head: Head) -> str:
    """(5, 1) -> "5.1"."""
    return f"{head[0]}.{head[1]}"


def triangle(pattern: Tensor, labels: list[str], width: int) -> str:
    """One head in grey letters: (T, T) -> a line a query, its token on the left, a letter a key."""
    room = width - len(labels) - 6
    if room < 8:
        return f"(a picture of {len(labels)} tokens does not fit {width} columns: write it to a file, with -o)"
    lines = []
    wide = min(room, 16)
    for row, name in enumerate(labels):
        letters = "".join(grey(weight) for weight in pattern[row, : row + 1].tolist())
        lines.append(f"{row:4d} {name[:wide]:>{wide}} {letters}".rstrip())
    return "\n".join(lines)
