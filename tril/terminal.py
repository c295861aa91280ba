"""Show heads in a terminal: token labels, tables, and one head drawn in characters."""

import math
import textwrap
from collections.abc import Mapping, Sequence

from torch import Tensor

from tril.errors import printable
from tril.kinds import KINDS, Upstream, by_kind, name_of, short
from tril.metrics import METRICS, Head, Heads, HeadScores, Metrics

GREY = " .:-=+*#%@"  # darker for a larger weight, in tenths
SHOWN = str.maketrans(" \n\t", "␣↵⇥")
COLUMNS = "Columns and metrics; A_ij is the weight of query i for key j:\n" + "\n".join(
    textwrap.fill(f"{title:8} {name}: {meaning}", 80, initial_indent=" " * 4, subsequent_indent=" " * 13)
    for name, (title, _, meaning) in METRICS.items()
)
UPSTREAM = """upstream heads: a head's score on the probe, and without one of a layer below
(by keys: if only its keys are computed without that head)"""
MOST_ROWS = 16  # heads in a table, unless more are asked for
MOST_NAMED = 2  # heads of a kind that fit a line of 80 columns


def label(token: bytes | str) -> str:
    """Show a token with every character visible: `␣the`, `↵`; `\\xe2` is a part of one, `\\u200b` a hidden one."""
    text = token if isinstance(token, str) else token.decode(errors="backslashreplace")
    return printable(text).translate(SHOWN)


def report(scores: HeadScores, shown: Heads, heads: Heads, upstream: Mapping[Head, Upstream]) -> str:
    """Format a table of some heads, by default of those shown, of many the best; lines for kinds and upstream heads."""
    heads = heads or (shown if len(shown) <= MOST_ROWS else best(scores, shown))
    text = f"{table(scores, heads)}\n\n{in_words(scores, shown)}"
    if upstream:
        text += f"\n{UPSTREAM}"
        for head, words in upstream.items():
            text += "\n" + textwrap.fill(f"{name_of(head):>6} {words}", 80, subsequent_indent=" " * 7)
    if len(heads) < len(shown):
        text += f'\nthe table has {len(heads)} of {len(shown)} heads; --heads "*.*" shows all, -o page.html draws them'
    return text


def table(scores: HeadScores, heads: Heads) -> str:
    """Format one line for each head, and one for a head that attends evenly; more if their masks differ.

    After ablation over several texts the rise of the loss has its standard error.
    """
    columns = [name for name in METRICS if name in scores.mean]

    def cell(name: str, head: Head) -> str:
        """Format what was measured of a head."""
        text = number(scores.mean, name, head)
        rises = scores.samples[name][:, *head]
        return f"{text} ± {rises.std() / len(rises) ** 0.5:.4f}" if name == "ablation" and len(rises) > 1 else text

    rows = [("head", *(METRICS[name][0] for name in columns))]
    rows += [(name_of(head), *(cell(name, head) for name in columns)) for head in heads]
    rows += dict.fromkeys(("even", *(number(scores.chance, name, head) for name in columns)) for head in heads)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "even: attends evenly; (ctrl): ind where nothing repeats; columns: tril heads -h"])


def best(scores: HeadScores, heads: Heads) -> list[Head]:
    """Choose heads for a shorter table: the best two of each kind, after --ablate those that the loss needs most."""
    if "ablation" in scores.mean:
        return sorted(heads, key=lambda head: -scores.mean["ablation"][head])[:MOST_ROWS]
    return [head for group in by_kind(scores, heads).values() for head, _ in group[:2]]


def in_words(scores: HeadScores, heads: Heads) -> str:
    """Format one line for each kind: the number of its heads, and the highest scores."""
    lines = ["heads by where they look, each with its score (and what attending evenly gives)"]
    for name, group in by_kind(scores, heads).items():
        line = f"{len(group):4d}  {KINDS[name][0]}"
        if name != "other":
            named = [f"{name_of(head)} {short(kind.score)} ({short(kind.chance)})" for head, kind in group[:MOST_NAMED]]
            line = f"{line}: {', '.join(named + ['...'] * (len(group) > MOST_NAMED))}"
        lines.append(line)
    return "\n".join(lines)


def number(metrics: Metrics, name: str, head: Head) -> str:
    """Format a metric of a head, (L, H); empty if it was not measured."""
    value = metrics[name][head].item() if name in metrics else math.nan
    return "" if math.isnan(value) else format(value, METRICS[name][1])


def triangle(pattern: Tensor, labels: Sequence[str], width: int) -> str:
    """Draw one head, (T, T), in characters: a line for each query with its token, a character for each key.

    labels: of the T tokens; width: the columns of the terminal.

    Returns a sentence if the tokens do not fit.
    """
    if len(labels) > width - 22:
        return f"({len(labels)} tokens do not fit {width} columns: give a shorter --text, or a picture by -o)"
    lines = []
    for row, name in enumerate(labels):
        characters = "".join(GREY[min(9, int(10 * weight))] for weight in pattern[row, : row + 1].tolist())
        lines.append(f"{row:4d} {name:>16.16} {characters}".rstrip())
    return "\n".join(lines)
