"""Speed of generating text: without a cache, with one, in bfloat16, and by `transformers`.

Ways to run:
    python benchmarks/decode.py                      GPT-2 small on a CPU, a few minutes
    python benchmarks/decode.py --device cuda        batches of 1 and 64
    python benchmarks/decode.py --out results.jsonl  one JSON object a measurement
    python benchmarks/decode.py --tiny               everything small, to see that the script works

All ways continue the same random prompt by the likeliest tokens of the same random weights, in turn, as often as
--repeats says; the medians are printed. `same` is how many tokens a text has in common with the first way's before the
first that differs: rounding decides between two tokens that are nearly as likely.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.record import Record, describe_machine
from model import GPT, GPTConfig
from model.huggingface import config_to_huggingface, tensors_to_huggingface
from training.device import find_device

Way = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    tiny: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, to see that the script works."""
    device: str = "cpu"
    """Where to measure."""
    repeats: int = 3
    """How often each way is measured, after one time that does not count."""
    out: Path | None = None
    """A file to append the measurements to."""


def in_transformers(model: GPT) -> transformers.PreTrainedModel:
    """The same weights there, in float32."""
    config = transformers.AutoConfig.for_model(**config_to_huggingface(model.config, 0, 0))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    loaded = theirs.load_state_dict(tensors_to_huggingface(model.config, model.state_dict()), strict=False)
    assert not loaded.unexpected_keys and set(loaded.missing_keys) <= {"lm_head.weight"}, loaded  # which is tied
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None
    return theirs.to(model.lm_head.weight.device)


def make_model(config: GPTConfig, device: torch.device) -> GPT:
    """Random weights that have a preference."""
    model = GPT(config).eval()
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.dim() == 2):
            matrix.mul_(2)  # freshly made, a model finds most tokens nearly as likely
    return model.to(device)


def all_ways(model: GPT) -> dict[str, Way]:
    """{name: (prompts (B, T), number of new tokens) -> (B, T + new)}; the first is the one to compare with."""
    device = model.lm_head.weight.device
    theirs, half = in_transformers(model), GPT(model.config).eval().to(device, torch.bfloat16)
    half.load_state_dict(model.state_dict())

    def by_transformers(theirs: transformers.PreTrainedModel, idx: Tensor, new: int) -> Tensor:
        return theirs.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=new, do_sample=False)

    ways = {
        "no cache, float32": partial(model.generate, temperature=0, use_cache=False),
        "cache, float32": partial(model.generate, temperature=0),
        "cache, bfloat16": partial(half.generate, temperature=0),
        "transformers, float32": partial(by_transformers, theirs),
    }
    if device.type == "cuda":
        ways["transformers, bfloat16"] = partial(by_transformers, in_transformers(model).bfloat16())
    return ways


def seconds(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """How long the work takes, and its tokens; to read them is to wait for the device."""
    began = time.perf_counter()
    tokens = work().cpu()
    return time.perf_counter() - began, tokens


def measure(ways: dict[str, Way], idx: Tensor, new: int, repeats: int) -> dict[str, dict]:
    """{way: seconds to the first token, milliseconds for each later one, tokens a second, tokens in common}."""
    times = {name: ([], []) for name in ways}
    texts = {}
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            first, _ = seconds(lambda way=way: way(idx, 1))
            whole, text = seconds(lambda way=way: way(idx, new))
            texts[name] = text[:, idx.size(1) :]
            if repeat > 0:
                times[name][0].append(first)
                times[name][1].append(whole)
    results, reference = {}, next(iter(texts.values()))
    for name, (firsts, wholes) in times.items():
        first, whole = statistics.median(firsts), statistics.median(wholes)
        common = (texts[name] == reference).long().cumprod(dim=1).sum(dim=1)
        results[name] = {
            "tokens/s": len(idx) * new / whole,
            "ms a token": 1e3 * (whole - first) / (new - 1),
            "first token s": first,
            "same": common.min().item(),
        }
    return results


def main(options: Options) -> None:
    device = find_device(options.device)
    machine = describe_machine(device.type) | {"transformers": transformers.__version__}
    record = Record(options.out, machine)
    print(machine)
    torch.manual_seed(0)
    tiny = GPTConfig(n_layer=2, n_head=3, n_embd=48, vocab_size=211, context_length=64)
    config, prompt, new = (tiny, 11, 7) if options.tiny else (GPTConfig(vocab_size=50257), 500, 200)
    ways = all_ways(make_model(config, device))
    for batch in (1, 64) if device.type == "cuda" else (1, 3) if options.tiny else (1,):
        idx = torch.randint(config.vocab_size, (batch, prompt), device=device)
        for way, result in measure(ways, idx, new, options.repeats).items():
            what = {"way": way, "batch": batch, "prompt": prompt, "new": new}
            print(f"{f'batch {batch}, {way}':35s} " + "  ".join(f"{key} {value:.4g}" for key, value in result.items()))
            record(what | result)


if __name__ == "__main__":
    main(tyro.cli(Options))
