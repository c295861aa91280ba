"""How fast this machine is and how fast we are on it, beside nanoGPT's behaviour, transformers, tiktoken, and physics.

Ways to run:
    make bench                                             everything, into benchmarks/results/
    make bench TEXT=input.txt                              with the text by which time to loss is usually told
    python benchmarks/bench.py --stages peak step          some stages
    python benchmarks/bench.py --out results.jsonl         one JSON object a measurement
    python benchmarks/bench.py --tiny                      everything small, to see that it works

What is compared is measured in turns, and medians are told; JSON has the 10th and 90th percentiles too. "of peak" is a
share of the fastest matrix product found in the same run. nanoGPT is benchmarks/nanogpt.py.
"""

import gc
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import nanogpt
from benchmarks.operations import measure_attention, measure_peak, measure_rows
from benchmarks.record import Record, describe_machine
from benchmarks.steps import measure_loader, measure_optimizer, measure_split, measure_step
from benchmarks.timing import ON_CPU, Bench
from configs import ConfigError, parse, run_script
from data.prepare import DataConfig, prepare
from data.sources import files
from model import GPT, GPTConfig
from training.config import TrainConfig
from training.device import choose_device, device_type

ROOT = Path(__file__).parent.parent
LIKE_TINY_SHAKESPEARE = 1_115_394  # characters
SEEDS = (1, 2, 3)


def measure_loss(bench: Bench) -> Iterator[dict]:
    """Time to loss on characters: nanoGPT at its README's learning rate, at a better one until it is there too, and
    ours over seeds.

    The loop is without evaluations and warming up. Of the processes, nanoGPT's makes ids of its text, ours opens those
    that were made before, but ends with a checkpoint, samples and a report.
    """
    device = str(bench.device)
    with TemporaryDirectory() as directory:
        text = bench.text or some_text(Path(directory) / "stdlib.txt", 4000 if bench.tiny else LIKE_TINY_SHAKESPEARE)
        corpus = prepare(DataConfig(str(text), "chars"), Path(directory) / "corpus").directory
        less = ["--max_steps", 2] if bench.tiny else []

        def nanogpt_run(*options: object) -> tuple[dict, float]:
            out, seconds = process("benchmarks/nanogpt.py", text, "--device", device, *options, *less)
            return json.loads(out.splitlines()[-1]), seconds

        result, seconds = nanogpt_run()
        goal, theirs = result["loss"], {"loop s": result["loop_seconds"], "process s": seconds}
        yield {"what": "nanoGPT, its README's rate", "text": text.name, "loss": goal} | theirs
        result, _ = nanogpt_run("--learning_rate", 4e-3, "--eval_every", 50)
        whole = {"loss": result["loss"], "loop s": result["loop_seconds"]}
        yield {"what": "nanoGPT, rate 0.004", "text": text.name} | whole
        there = next(({"loss": loss, "loop s": took} for took, loss in result["curve"] if loss <= goal), None)
        if there:
            yield {"what": "nanoGPT, rate 0.004, until there", "text": text.name} | there
        ours = []
        options = ["--data.source", corpus, "--train.device", device]
        options += ["--train.max_steps", 2, "--train.eval_every", 2] if bench.tiny else []
        for seed in SEEDS[:1] if bench.tiny else SEEDS:
            run = Path(directory) / f"run-{seed}"
            config = ROOT / "configs" / "shakespeare_char_fast.toml"
            _, seconds = process("train.py", config, *options, "--train.out_dir", run, "--train.seed", seed)
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            last = [line for line in lines if "val_loss" in line][-1]
            ours.append({"loss": last["val_loss"], "loop s": last["train_seconds"], "process s": seconds})
            yield {"what": f"ours, fast, seed {seed}", "text": text.name} | ours[-1]
    middle = {key: statistics.median(result[key] for result in ours) for key in ours[0]}
    faster = {name: theirs[f"{name} s"] / middle[f"{name} s"] for name in ("loop", "process")}
    if there:
        faster["loop, rate 0.004"] = there["loop s"] / middle["loop s"]
    yield {"what": "ours, times faster"} | faster | {"loss above": middle["loss"] - goal}


def some_text(path: Path, characters: int) -> Path:
    """The beginning of the Python standard library, in ASCII."""
    text = "".join(file.read_text(encoding="ascii", errors="ignore") for file in files("stdlib"))
    path.write_text(text[:characters], encoding="ascii")
    return path


def process(script: str, *arguments: object) -> tuple[str, float]:
    """What a script of ours prints, and its seconds from beginning to end."""
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ConfigError(f"{script} ended with {done.returncode}: {' '.join(done.stderr.split())[-400:]}")
    return done.stdout, time.perf_counter() - began


def as_nanogpt(model: GPT) -> nanogpt.NanoGPT:
    """The same weights there, and GPT-2's GELU, which nanoGPT has exactly and GPT-2 by its formula with tanh."""
    c, weights = model.config, model.state_dict()
    theirs = nanogpt.NanoGPT(
        nanogpt.Config(c.n_layer, c.n_head, c.n_embd, c.context_length, c.vocab_size, c.dropout, c.bias)
    )
    renamed = {"token_embedding": "tokens", "position_embedding": "positions", "final_norm": "norm", "lm_head": "head"}
    renamed |= {"attention_norm": "norm_1", "mlp_norm": "norm_2", "attention.o_proj": "attention.residual"}
    renamed |= {"mlp.up_proj": "up", "mlp.down_proj": "residual"}
    state = {}
    for name, tensor in weights.items():
        if ".q_proj." in name:
            parts = [weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            state[name.replace("q_proj", "qkv")] = torch.cat(parts)
        elif not re.search(r"\.[kv]_proj\.", name):
            old = next(old for old in renamed if f".{old}." in f".{name}")
            state[name.replace(old, renamed[old])] = tensor
    theirs.load_state_dict(state)
    for module in theirs.modules():
        if isinstance(module, torch.nn.GELU):
            module.approximate = "tanh"
    return theirs.to(model.lm_head.weight.device).train(model.training)


def measure_decode(bench: Bench) -> Iterator[dict]:
    """Text after a prompt, by benchmarks/decode.py; `same` counts tokens in common with nanoGPT, which has no cache."""
    from benchmarks import decode  # which needs transformers

    tiny = GPTConfig(n_layer=2, n_head=3, n_embd=48, vocab_size=211)
    config, prompt, new = (tiny, 5, 4) if bench.tiny else (GPTConfig(), 500, 200 if bench.cuda else 24)
    model = decode.make_model(config, bench.device)
    theirs = as_nanogpt(model)

    def nanogpt_generate(idx: torch.Tensor, new: int) -> torch.Tensor:
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=bench.cuda):  # as its sample.py has
            return theirs.generate(idx, new, top_k=1)

    ways = {"nanoGPT": nanogpt_generate} | decode.all_ways(model)
    del ways["no cache, float32"]
    for batch in (1, 64) if bench.cuda else (1,):
        idx = torch.randint(config.vocab_size, (batch, prompt), device=bench.device)
        for way, result in decode.measure(ways, idx, new, repeats=1 if bench.tiny else 2).items():
            what = {"what": f"{way} x {batch}", "batch": batch, "prompt": prompt, "new": new}
            yield what | result


def measure_tokenise(bench: Bench) -> Iterator[dict]:
    """Our preparation beside tiktoken alone, by benchmarks/tokenise.py, in a process that has no threads of torch's."""
    with TemporaryDirectory() as directory:
        out = Path(directory) / "results.jsonl"
        process(
            "benchmarks/tokenise.py", *(["--tiny"] if bench.tiny else ["bpe:4096", "--megabytes", 30]), "--out", out
        )
        yield from (json.loads(line) for line in out.read_text(encoding="utf-8").splitlines())


STAGES = {
    "peak": measure_peak,
    "rows": measure_rows,
    "attention": measure_attention,
    "step": measure_step,
    "split": measure_split,
    "loss": measure_loss,
    "decode": measure_decode,
    "loader": measure_loader,
    "optimizer": measure_optimizer,
    "tokenise": measure_tokenise,
}


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    stages: tuple[str, ...] = tuple(STAGES)
    """What to measure."""
    text: Path | None = None
    """The text for time to loss. None: as much of the Python standard library as Tiny Shakespeare has."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda or mps."""
    tiny: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, to see that it works."""
    out: Path | None = None
    """A file to append the measurements to; in a directory, one with the name of device and date."""

    def __post_init__(self) -> None:
        if unknown := set(self.stages) - STAGES.keys():
            raise ConfigError(f"stages are {', '.join(STAGES)}: there is no {min(unknown)}")
        if self.text and not self.text.is_file():
            raise ConfigError(f"there is no text {str(self.text)!r}")


def line(stage: str, what: str, result: dict) -> str:
    """One measurement in 80 columns: the first of its numbers, as many as fit."""
    text = f"{stage:9} {what:30.30}"
    for key, value in result.items():
        if isinstance(value, float):
            number = f" {key} {value:,.0f}" if abs(value) >= 1000 else f" {key} {value:.3g}"
            text += number if len(text + number) <= 80 and "_p" not in key else ""
    return text


def main(options: Options) -> None:
    asked = "auto" if device_type(options.device) == "cuda" else "float32"  # as nanoGPT trains on a CPU
    device, dtype = choose_device(TrainConfig(device=options.device, dtype=asked), ON_CPU.n_embd)
    bench = Bench(device, dtype, options.tiny, options.text)
    machine = describe_machine(device.type)
    print("\n".join(f"{key:9} {value}" for key, value in machine.items()))
    out = options.out
    if out and out.is_dir():
        out /= f"{re.sub('[^a-z0-9]+', '-', machine['device'].lower())}_{machine['date']}.jsonl"
    record = Record(out, machine)
    torch.manual_seed(0)
    for stage in options.stages:
        try:
            for result in STAGES[stage](bench):
                what = result.pop("what")
                print(line(stage, what, result), flush=True)
                record({"stage": stage, "what": what} | result)
        except torch.OutOfMemoryError:
            print(f"{stage:9} needs more memory than there is")
        gc.collect()
        torch.cuda.empty_cache()  # for the next stage, which may be other processes
    if out:
        print(f"{'results':9} {out}")


if __name__ == "__main__":
    run_script(lambda: main(parse(Options, sys.argv[1:])))
