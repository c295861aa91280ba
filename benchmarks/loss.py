"""Time to a loss on characters, beside nanoGPT: python benchmarks/bench.py --stages loss --text input.txt"""

import json
import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks import ROOT, evaluations, run, train
from data.prepare import DataConfig, prepare

LIKE_TINY_SHAKESPEARE = 1_115_394  # characters
SEEDS = (1, 2, 3)
FOR_GPU = ("--gpu", "--batch_size", 64, "--max_steps", 5000, "--eval_every", 250)  # nanoGPT's README


def measure_loss(device: torch.device, text: Path | None, tiny: bool) -> Iterator[dict]:
    """Train nanoGPT at its README's learning rate and ours in turns, then nanoGPT at a better rate and our longer runs.

    On a GPU one run each: ours, then nanoGPT until it is there. "s to goal" leads to the least loss that both reach.
    "loop s" are seconds of training steps without evaluations, nanoGPT's also without its first step. "process s" are
    seconds of the whole command: nanoGPT's also encodes the text; ours opens a prepared one, but probes the model,
    writes a checkpoint, a report and a sample. The quickstart prepares the standard library and learns its tokenizer.
    """
    with TemporaryDirectory() as directory:
        text = text or Path(directory) / "stdlib.txt"
        corpus = Path(directory) / "corpus"
        if not text.exists():
            text.write_text(standard_library()[: 4000 if tiny else LIKE_TINY_SHAKESPEARE], encoding="utf-8")
        prepare(DataConfig(str(text), "chars"), corpus)

        def train_nanogpt(*options: object) -> dict:
            fewer = ["--max_steps", 2, "--batch_size", 3] if tiny else []
            out, seconds = run(ROOT / "benchmarks" / "nanogpt.py", text, "--device", device, *options, *fewer)
            return json.loads(out.splitlines()[-1]) | {"process s": seconds}

        def train_ours(config: str, *options: object) -> dict:
            fewer = ["--train.max_steps", 2, "--train.eval_every", 2, "--train.batch_size", 3] if tiny else []
            file = ROOT / "configs" / f"{config}.toml"
            lines = train(ROOT / "train.py", file, *options, "--train.device", device, *fewer)
            curve = [(line["train_seconds"], line["val_loss"]) for line in evaluations(lines)]
            seconds, loss = curve[-1]
            result = {"loss": loss, "bits a byte": evaluations(lines)[-1]["val_bits_per_byte"], "curve": curve}
            return result | {"loop s": seconds, "process s": lines[-1]["process seconds"]}

        on_text = ["--data.source", corpus]
        if device.type == "cuda" or tiny:
            ours = train_ours("shakespeare_char_gpu", *on_text)
            theirs = train_nanogpt(*FOR_GPU, "--until", ours["loss"])
            goal = max(ours["loss"], min(loss for _, loss in theirs["curve"]))
            for what, result in (("nanoGPT for a GPU", theirs), ("ours for a GPU", ours)):
                reached = next(seconds for seconds, loss in result["curve"] if loss <= goal)
                yield {"what": what} | result | {"goal": goal, "s to goal": reached}
        if device.type == "cuda":
            return
        theirs = []
        ours = []
        for seed in SEEDS[:1] if tiny else SEEDS:
            theirs.append(train_nanogpt())
            yield {"what": "nanoGPT, its README's rate"} | theirs[-1]
            ours.append(train_ours("shakespeare_char_fast", *on_text, "--train.seed", seed))
            yield {"what": f"fast, seed {seed}"} | ours[-1]
        faster = {}
        for kind in ("loop s", "process s"):
            ratios = [a[kind] / b[kind] for a, b in zip(theirs, ours, strict=True)]
            faster[f"times, {kind}"] = statistics.median(ratios)
        loss = statistics.median(result["loss"] for result in ours)
        goal = theirs[0]["loss"]
        loop = statistics.median(result["loop s"] for result in theirs)
        better = train_nanogpt("--learning_rate", 4e-3, "--eval_every", 50)
        yield {"what": "nanoGPT, rate 0.004"} | better
        if reached := next((seconds for seconds, loss in better["curve"] if loss <= goal), None):
            yield {"what": "nanoGPT, rate 0.004, until there", "loss": goal, "loop s": reached}
            faster["times, rate 0.004"] = reached / statistics.median(result["loop s"] for result in ours)
        yield {"what": "fast, faster"} | faster | {"loss": loss, "loss difference": loss - goal}
        best = train_ours("shakespeare_char_best", *on_text)
        yield {"what": "best"} | best | {"in loops of nanoGPT": best["loop s"] / loop}
        quick = train_ours("quickstart", *(["--data.source", text] if tiny else []))
        yield {"what": "quickstart"} | quick | {"outside of training s": quick["process s"] - quick["loop s"]}


def standard_library() -> str:
    """Read the source code of the Python standard library, without its packages, ASCII only."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return "".join(file.read_text(encoding="ascii", errors="ignore") for file in files)
