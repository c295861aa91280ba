"""What looking at heads costs: time and memory beside eager attention, a share of training, and the size of a page.

Ways to run:
    python benchmarks/heads.py                      ten minutes on two CPU cores, 14 GB of memory for eager
    python benchmarks/heads.py --out results.jsonl  one JSON object a measurement
    python benchmarks/heads.py --device cuda        measure there
    python benchmarks/heads.py --tiny               everything small, to see that the script works

Each measurement is a process of its own. Extra memory is the peak of what was resident (on a GPU: allocated) over what
was when the model stood there. Eager is `transformers` with output_attentions, which returns all T x T weights.
"""

import resource
import statistics
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from math import inf
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.record import Record, describe_machine
from data.tokenizer import load_tokenizer
from inspection import capture, influence, rollout
from inspection.metrics import measure
from inspection.page import Snapshot, write_page
from inspection.watch import HeadWatch
from model import GPT, GPTConfig
from model.checkpoint import find_checkpoint
from train import next_token_loss, read_config
from training.config import TrainConfig
from training.device import autocast
from training.optimizer import make_optimizer

ROOT = Path(__file__).parent.parent
SMALL = {"n_layer": 2, "n_head": 3, "n_embd": 48, "vocab_size": 211}
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "vocab_size": 50257}
MEMORY_TARGET, SHARE_TARGET = 1e9, 0.01  # bytes at 4,096 tokens; of a step's time
SHARPER = 3.0  # what random query and key matrices of a page are multiplied by, or all heads look evenly
QUICKSTART = ROOT / "out" / "quickstart"


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    tiny: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, in seconds."""
    device: str = "cpu"
    """Where models run: cpu or cuda."""
    parts: tuple[Literal["scores", "training", "pages"], ...] = ("scores", "training", "pages")
    """What to measure."""
    out: Path | None = None
    """A file to append the measurements to."""


def alone(work: Callable[..., dict], *arguments: object) -> dict:
    """The result of this work in a new process. Ours stays small: a process inherits the peak of the one it is from."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def clock(device: str) -> float:
    """Seconds, when the device has done its work."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


class Memory:
    """Bytes over those at the beginning."""

    def __init__(self, device: str):
        self.device = device
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        elif (forget := Path("/proc/self/clear_refs")).exists():
            forget.write_text("5")  # the peak so far, which building the model has left
        self.base = self.now()
        self.hidden = self.peak()  # what could not be forgotten: less cannot be seen

    def now(self) -> int:
        statm = Path("/proc/self/statm")
        if self.device != "cpu":
            return torch.cuda.memory_allocated()
        if not statm.exists():
            return self.most()
        return int(statm.read_text().split()[1]) * resource.getpagesize()

    def most(self) -> int:
        if self.device != "cpu":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def peak(self) -> int:
        return max(0, self.most() - self.base)


def available(device: str) -> float:
    """Bytes that can still be used, or inf if that is not known."""
    meminfo = Path("/proc/meminfo")
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    if not meminfo.exists():
        return inf
    return 1024 * int(meminfo.read_text().split("MemAvailable:")[1].split()[0])


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {f"{name}_seconds": statistics.median(each[name] for each in rounds) for name in rounds[0]}


@torch.no_grad()
def score_ours(shape: dict, T: int, device: str, repeats: int) -> dict:
    """Seconds and extra memory of the scores of all heads: the model under capture, the scores, the verification."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**shape, context_length=T)).to(device).eval()
    rounds, peaks = [], {}

    def look(idx: torch.Tensor, memory: Memory | None = None) -> dict[str, float]:
        times = [clock(device)]
        with capture(model) as att:
            model.hidden(idx)
        for stage, work in {"model": lambda: None, "scores": att.measured, "verify": att.verify}.items():
            work()
            times.append(clock(device))
            if memory:
                peaks[f"{stage}_extra_bytes"] = memory.peak()
        seconds = [after - before for before, after in pairwise(times)]
        return dict(zip(("model", "scores", "verify"), seconds, strict=True)) | {"all": sum(seconds)}

    idx = torch.randint(shape["vocab_size"], (1, T), device=device)
    look(idx[:, :16])  # what is loaded when it is first used is nobody's cost
    memory = Memory(device)
    for number in range(repeats):
        rounds.append(look(idx, None if number else memory))
        began = clock(device)
        model.hidden(idx)
        rounds[-1]["without_capture"] = clock(device) - began
    return medians(rounds) | peaks | {"extra_bytes": peaks["verify_extra_bytes"], "hidden_bytes": memory.hidden}


@torch.no_grad()
def score_eager(shape: dict, T: int, device: str, repeats: int) -> dict:
    """The same from the weights that eager attention returns; max_logit is not to be had from them."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(**shape, n_positions=T, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="eager").to(device).eval()
    rounds, peaks = [], {}

    def look(idx: torch.Tensor, memory: Memory | None = None) -> dict[str, float]:
        times = [clock(device)]
        attentions = model.transformer(idx, output_attentions=True, use_cache=False).attentions
        times.append(clock(device))
        if memory:
            peaks["model_extra_bytes"] = memory.peak()
        for weights in attentions:
            measure([(0, weights, weights)])
        times.append(clock(device))
        if memory:
            peaks["extra_bytes"] = memory.peak()
        return {"model": times[1] - times[0], "scores": times[2] - times[1], "all": times[2] - times[0]}

    idx = torch.randint(shape["vocab_size"], (1, T), device=device)
    look(idx[:, :16])
    memory = Memory(device)
    layer = shape["n_head"] * T * T * 4
    needed, there = (shape["n_layer"] + 4) * layer, available(device)  # 4: what a layer computes on the way, about
    if needed > there:
        return {"skipped": f"it would need about {needed / 1e9:.1f} GB, and {there / 1e9:.1f} are there"}
    for number in range(repeats):
        rounds.append(look(idx, None if number else memory))
    return medians(rounds) | peaks | {"hidden_bytes": memory.hidden}


def train_and_look(config: GPTConfig, options: TrainConfig, device: str, repeats: int) -> dict:
    """Seconds of a training step, and of scores of all heads on one window and one probe, in turns."""
    torch.manual_seed(0)
    where, dtype = torch.device(device), torch.float32 if device == "cpu" else torch.bfloat16
    model = GPT(config).to(device).train()
    optimizer = make_optimizer(model, options)
    loss_fn = torch.compile(next_token_loss, dynamic=False) if device != "cpu" else next_token_loss
    size = (2, options.batch_size, config.context_length)
    inputs, targets = torch.randint(config.vocab_size, size, device=device)
    watch = HeadWatch(inputs.flatten().cpu().numpy(), [config.vocab_size - 1], config.context_length)

    def step() -> None:
        (loss_fn(model, inputs, targets, dtype) / targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip or inf)
        optimizer.step()
        optimizer.zero_grad()

    def summary() -> None:
        with autocast(where, dtype):
            watch.scores(model)

    rounds = []
    for _ in range(repeats + 1):
        times = [clock(device)]
        for work in (step, summary):
            work()
            times.append(clock(device))
        rounds.append({"step": times[1] - times[0], "summary": times[2] - times[1]})
    result = medians(rounds[1:])
    share = result["summary_seconds"] / (options.eval_every * result["step_seconds"])
    return result | {"eval_every": options.eval_every, "share": share}


def page_sizes(shape: dict | None, T: int) -> dict:
    """Bytes of the pages of one text: of a trained model if there is no shape, else of random weights, made sharper."""
    torch.manual_seed(0)
    if shape is None:
        model, tokenizer = GPT.from_pretrained(QUICKSTART), load_tokenizer(find_checkpoint(QUICKSTART))
        idx = torch.from_numpy(tokenizer.encode(Path(__file__).read_text(encoding="utf-8")).astype("int64"))[None, :T]
        labels = [tokenizer.decode([token]) for token in idx[0].tolist()]
    else:
        model = GPT(GPTConfig(**shape, context_length=T)).eval()
        for block in model.blocks:
            for matrix in (block.attention.q_proj.weight, block.attention.k_proj.weight):
                matrix.data.mul_(SHARPER)
        idx = torch.randint(shape["vocab_size"], (1, T))
        labels = [f"token{token}" for token in idx[0].tolist()]
    with capture(model) as att, torch.no_grad():
        model.hidden(idx)
    L, H = model.config.n_layer, model.config.n_head
    scores = att.scores()
    tables = {name: values for name, values in scores.items() if values.dim() == 2}
    _, tokens, probabilities = influence(model, idx, rows=[])
    predictions = [(f"token{t}", p) for t, p in zip(tokens.tolist(), probabilities.tolist(), strict=True)]
    heads = [f"{layer}.{head}" for layer in range(L) for head in range(H)]
    weights = L * H * T * (T + 1) // 2
    result = {"heads": len(heads), "tokens": T, "weights": weights, "mean_entropy": scores["entropy"].mean().item()}

    def written(limit: int | None) -> tuple[int, float, list[str]]:
        look = Snapshot(
            name="step-00000000",
            step=0,
            loss=None,
            note="",
            scores=tables,
            errors={},
            pattern=lambda head: att.pattern(*map(int, head.split(".")))[0],
            rollout=rollout(att)[0],
            influence=None,
            predictions=predictions,
        )
        with TemporaryDirectory() as directory:
            path, began = Path(directory) / "page.html", time.perf_counter()
            notes = write_page(path, "heads", "", labels, heads, [look], **({"limit": limit} if limit else {}))
            return path.stat().st_size, time.perf_counter() - began, notes

    size, seconds, notes = written(None)
    result |= {"page_bytes": size, "page_seconds": seconds, "notes": notes}
    result["whole_page_bytes"] = written(2**40)[0] if notes else size
    if find_spec("bertviz"):
        import bertviz

        attentions = [att.patterns(layer) for layer in range(L)]
        for name in ("head_view", "model_view"):
            began = time.perf_counter()
            html = getattr(bertviz, name)(attentions, labels, html_action="return").data
            result[f"{name}_bytes"] = len(html.encode())
            result[f"{name}_seconds"] = time.perf_counter() - began
            result[f"{name}_loads"] = "require.min.js" in html and "d3" in html
            del html
    return result


def main(options: Options) -> None:
    device, tiny = options.device, options.tiny
    record = Record(options.out, describe_machine(device))
    print(", ".join(f"{name} {value}" for name, value in record.machine.items()))

    if "scores" in options.parts:
        tabulate_scores(record, SMALL if tiny else GPT2, [32] if tiny else [512, 1024, 2048, 4096], device)
    if "training" in options.parts:
        tabulate_training(record, tiny, device)
    if "pages" in options.parts:
        tabulate_pages(record, tiny)


def tabulate_scores(record: Record, shape: dict, lengths: list[int], device: str) -> None:
    size = f"{shape['n_layer']} x {shape['n_head']} of width {shape['n_embd']}"
    print(f"\nScores of all heads, {size} with random weights, on T tokens:")
    print("    T  way    seconds  = model + scores + verify   extra peak   all T x T")
    for T in lengths:
        weights = shape["n_layer"] * shape["n_head"] * T * T * 4 / 1e6
        for way, work in {"ours": score_ours, "eager": score_eager}.items():
            setting = {"way": way, "tokens": T, **shape}
            repeats = 5 if T <= 1024 else 3 if T <= 2048 else 2
            result = record({"what": "scores"} | setting | alone(work, shape, T, device, repeats))
            if "skipped" in result:
                print(f"{T:5}  {way:6} not measured: {result['skipped']}")
                continue
            verify = f"{result['verify_seconds']:8.2f}" if way == "ours" else "        "
            print(
                f"{T:5}  {way:5} {result['all_seconds']:8.2f}   {result['model_seconds']:7.2f} "
                f"{result['scores_seconds']:8.2f} {verify} {result['extra_bytes'] / 1e6:10,.0f} MB"
                f" {weights:8,.0f} MB",
                flush=True,
            )
            if way == "ours" and T == 4096:
                extra = result["extra_bytes"]
                target = f"target, ours at T = 4096 under {MEMORY_TARGET / 1e9:g} GB: "
                target += f"{'met' if extra < MEMORY_TARGET else 'MISSED'}, {extra / 1e9:.2f} GB"
    if 4096 in lengths:
        print(target)


def tabulate_training(record: Record, tiny: bool, device: str) -> None:
    quickstart = read_config([])
    vocab_size = int(quickstart.data.tokenizer.removeprefix("bpe:"))
    runs = {
        "quickstart": (GPTConfig(**asdict(quickstart.model), vocab_size=vocab_size), quickstart.train),
        "GPT-2 small": (GPTConfig(context_length=256), TrainConfig(batch_size=4, eval_every=250)),
    }
    if tiny:
        runs = {"tiny": (GPTConfig(**SMALL, context_length=16), TrainConfig(batch_size=2, eval_every=10))}
    print("\nScores of all heads while training, on one window and one probe:")
    print("model         context  batch    step s  summary s   every    share of steps")
    for name, (config, options) in runs.items():
        setting = {"model": name, "context": config.context_length, "batch": options.batch_size}
        result = record(
            {"what": "training"} | setting | alone(train_and_look, config, options, device, 2 if tiny else 7)
        )
        share = result["share"]
        print(
            f"{name:12} {config.context_length:8} {options.batch_size:6} {result['step_seconds']:9.3f} "
            f"{result['summary_seconds']:10.3f} {options.eval_every:7}   {share:7.2%} "
            f"{'met' if share < SHARE_TARGET else 'MISSED'}",
            flush=True,
        )
    print(f"target: under {SHARE_TARGET:.0%} of the time of the steps in between")


def tabulate_pages(record: Record, tiny: bool) -> None:
    shape = SMALL if tiny else GPT2
    cases = [("random", shape, T) for T in ((8,) if tiny else (64, 256, 512))]
    if not tiny and QUICKSTART.is_dir():
        cases.insert(0, ("trained", None, 128))
    print(f"\nHTML pages in MB, of {shape['n_layer']} x {shape['n_head']} heads of random weights (matrices of queries")
    print(f"and keys {SHARPER:g} times as large as usual), and of out/quickstart, if it is there:")
    print("weights       T  entropy     ours     whole   B/weight  head_view  model_view")
    for weights, of, T in cases:
        result = record({"what": "pages", "from": weights} | alone(page_sizes, of, T))
        whole, ours = result["whole_page_bytes"], f"{result['page_bytes'] / 1e6:.2f}"
        sizes = (result.get(f"{view}_bytes") for view in ("head_view", "model_view"))
        theirs = [f"{size / 1e6:.2f}" if size else "-" for size in sizes]
        print(
            f"{weights:9} {T:5} {result['mean_entropy']:8.2f} {ours:>8} {whole / 1e6:9.2f} "
            f"{whole / result['weights']:10.2f} {theirs[0]:>10} {theirs[1]:>11}",
            flush=True,
        )
        for note in result["notes"]:
            print(textwrap.fill(note, 80, initial_indent="    ", subsequent_indent="    "))
    if not find_spec("bertviz"):
        print("head_view, model_view: BertViz is not here (pip install bertviz 'ipython<9')")


if __name__ == "__main__":
    main(tyro.cli(Options))
