"""The report of a run: one static HTML page about the files of the run directory.

Training writes report.html at its start, at each evaluation and checkpoint, and at its end. Nothing reads it back.

The page has no script, and its policy forbids every request. All values reach it through one template, in which Jinja
escapes markup and `visible` escapes control characters: samples, names and options stay text.
"""

import math
import time
import tomllib
from pathlib import Path

import jinja2

from cli.html import own_hash
from cli.script import visible
from errors import UserError
from training import disk
from training.directory import best_validation, next_commands, read_metrics

TEMPLATE = Path(__file__).with_name("report.html")
JINJA = jinja2.Environment(  # keeps the compiled template from one report to the next
    loader=jinja2.FileSystemLoader(TEMPLATE.parent),
    autoescape=True,
    finalize=lambda value: visible(str(value)),
    trim_blocks=True,
)
FIGURES = {
    "val_loss": ("Validation loss, nats a token", "{:.4f}"),
    "val_bits_per_byte": ("Validation, bits a byte", "{:.4f}"),
    "train_seconds": ("Training time, without evaluations", "{:,.0f} s"),
    "tokens_per_second": ("Latest speed, tokens a second", "{:,.0f}"),
    "best": ("Best checkpoint", "step {:,}"),
}
# The norm can show trouble before the loss does. The configuration determines the learning rate, one number the speed.
CHARTS = {
    "Loss, nats a token": {"training": "train_loss", "validation": "val_loss"},
    "Gradient norm": {"norm": "grad_norm"},
}
LEFT, RIGHT, TOP, BOTTOM = 50, 460, 10, 214  # edges of the plot in a chart of 480 x 240; axis labels are outside
MOST_POINTS, MOST_EVALUATIONS, MOST_LETTERS = 5000, 30, 2000  # of a curve; in the page; of a sample


def refresh_report(directory: Path, checkpoints: list[Path], about: dict[str, dict]) -> None:
    """Call `write_report` for a run that goes on whatever happens: a failure prints a line."""
    try:
        write_report(directory, checkpoints, about)
    except Exception as error:
        print(visible(f"there is no new report.html: {error!r:.200}"))


def write_report(directory: Path, checkpoints: list[Path], about: dict[str, dict]) -> Path:
    """Write report.html into a run directory, as a whole or not at all, and return its path.

    checkpoints: those of the run, newest first. about: the certificate and the environment of a session.

    Raises UserError if the files there are not those of a run, OSError if one cannot be read or the page be written.
    """
    style = own_hash(TEMPLATE.read_text(encoding="utf-8"), "style")
    try:
        page = JINJA.get_template(TEMPLATE.name).render(read_run(directory, checkpoints, about), own_style=style)
    except (LookupError, TypeError, ValueError, AttributeError, jinja2.UndefinedError) as error:
        raise UserError(f"{directory} does not hold the files of a run: {error!r:.200}") from error
    disk.replace_file(directory / TEMPLATE.name, page.encode(errors="replace"))  # a file name need not be valid UTF-8
    return directory / TEMPLATE.name


def read_run(directory: Path, checkpoints: list[Path], about: dict[str, dict]) -> dict[str, object]:
    """Return the variables of the template; see `write_report`."""
    config = (directory / "config.toml").read_text(encoding="utf-8")
    options = tomllib.loads(config)
    lines = read_metrics(directory)
    max_steps = options["train"]["max_steps"]
    saved = int(checkpoints[0].name.removeprefix("step-")) if checkpoints else 0
    step = max([saved, *(line["step"] for line in lines)])
    best = best_validation(lines, checkpoints)
    finished = saved == max_steps and any(line["step"] == max_steps for line in lines if "val_loss" in line)
    facts_of_session = about.get("certificate", {}) | about.get("environment", {})
    model = options["model"]
    facts = [model["family"], f"{model['n_layer']} layers of {model['n_embd']}", options["data"]["source"]]
    facts += [facts_of_session.get("device"), facts_of_session.get("dtype"), f"step {step:,} of {max_steps:,}"]
    charts = [draw_chart(title, keys, lines, step) for title, keys in CHARTS.items()]
    latest = {key: value for line in lines for key, value in line.items() if value is not None}
    if best:
        latest["best"] = best["step"]
    return {
        "name": directory.absolute().name,
        "saved": saved,
        "finished": finished,
        "summary": " · ".join(filter(None, facts)),
        "written": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "figures": [(name, form.format(latest[key])) for key, (name, form) in FIGURES.items() if key in latest],
        "charts": [chart for chart in charts if any(chart["curves"].values())],
        "sections": {
            "Next": next_commands(directory, saved, best, finished),
            "Evaluations": read_evaluations(lines),
            "Configuration": [("config.toml", config)],
            "Certificate and environment": facts_of_session.items(),
        },
    }


def read_evaluations(lines: list[dict]) -> list[tuple[str, str]]:
    """Return (step and losses, sample) of at most MOST_EVALUATIONS, the newest first; the last one is among them."""
    samples = {line["step"]: line["sample"][:MOST_LETTERS] for line in lines if "sample" in line}
    validations = [line for line in lines if line.get("val_loss") is not None]
    every = 1 + len(validations) // MOST_EVALUATIONS
    evaluations = []
    for line in validations[::-every]:
        losses = f"{line['val_loss']:.4f} nats a token, {line['val_bits_per_byte']:.4f} bits a byte"
        evaluations.append((f"step {line['step']:,}: {losses}", samples.get(line["step"], "")))
    return evaluations


def draw_chart(title: str, keys: dict[str, str], lines: list[dict], last_step: int) -> dict[str, object]:
    """Return the places of labels and curves in a chart from step 0 to `last_step`.

    keys: {name of a curve: its key in metrics.jsonl}.
    """
    width = max(last_step, 5)  # for ticks at whole steps
    curves = {}
    for name, key in keys.items():
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        curves[name] = points[:: -1 - len(points) // MOST_POINTS]  # from the last one back
    values = [value for points in curves.values() for _, value in points] or [0]
    low = min(values)
    height = max(values) - low or abs(low) or 1

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + step / width * (RIGHT - LEFT)
        y = BOTTOM - (value - low) / height * (BOTTOM - TOP)
        return round(x, 1), round(y, 1)

    return {
        "title": title,
        "rows": [(place(0, tick)[1], f"{tick:,.6g}") for tick in ticks(low, low + height)],
        "columns": [(place(tick, low)[0], f"{tick:,.6g}") for tick in ticks(0, width)],
        "curves": {name: [place(*point) for point in points] for name, points in curves.items()},
    }


def ticks(low: float, high: float) -> list[float]:
    """Return two to six round numbers between low and high, at distances of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10((high - low) / 5))
    distance = next(digit * power for digit in (1, 2, 5, 10) if 5 * digit * power >= high - low)
    return [number * distance for number in range(math.ceil(low / distance), math.floor(high / distance) + 1)]
