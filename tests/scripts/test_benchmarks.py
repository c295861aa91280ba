"""The benchmarks run in tiny sizes, their statistics are known ones, and nanoGPT learns what our GPT-2 learns."""

import json
import math
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from benchmarks import bench, compare, nanogpt
from errors import UserError
from model import GPT, GPTConfig
from tests.conftest import ROOT, tiny_run
from training.config import TrainConfig

RENAMED = {"token_embedding": "tokens", "position_embedding": "positions", "final_norm": "norm", "lm_head": "head"}
RENAMED |= {"attention_norm": "norm_1", "mlp_norm": "norm_2", "attention.o_proj": "attention.residual"}
RENAMED |= {"mlp.up_proj": "up", "mlp.down_proj": "residual", "q_proj": "qkv"}


def as_nanogpt(model: GPT) -> nanogpt.NanoGPT:
    """Return nanoGPT with the same weights, and with GPT-2's approximation of GELU."""
    c, weights, state = model.config, model.state_dict(), {}
    for name, tensor in weights.items():
        if "q_proj" in name:
            tensor = torch.cat([weights[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")])
        for ours, theirs in RENAMED.items():
            name = name.replace(f"{ours}.", f"{theirs}.")
        if "k_proj" not in name and "v_proj" not in name:
            state[name] = tensor
    theirs = nanogpt.NanoGPT(nanogpt.Config(c.n_layer, c.n_head, c.n_embd, c.context_length, c.vocab_size))
    theirs.load_state_dict(state)
    for block in theirs.blocks:
        block.gelu.approximate = "tanh"
    return theirs


def test_nanogpt_learns_as_gpt2_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = GPT(GPTConfig(n_layer=2, n_head=3, n_embd=48, context_length=11, vocab_size=67, bias=False))
    theirs = as_nanogpt(ours)
    batches = torch.randint(67, (4, 2, 5, 11))
    feed = iter(batches)
    monkeypatch.setattr(nanogpt, "batch", lambda *arguments: next(feed))
    list(nanogpt.steps(theirs, nanogpt.make_optimizer(theirs, 0.1), tmp_path, 5, learning_rate=0.1, max_steps=4))
    train = TrainConfig(learning_rate=0.1, beta2=0.99, warmup_steps=101)  # nanoGPT divides by one step more
    here = bench.Bench(torch.device("cpu"), tiny=True)
    list(islice(bench.steps(here, ours, train, lambda step, device: batches[step]), 4))
    torch.testing.assert_close(as_nanogpt(ours).state_dict(), theirs.state_dict(), atol=1e-5, rtol=1e-4)


@pytest.mark.long
def test_every_stage_is_measured(tmp_path: Path) -> None:
    bench.main(bench.Options(device="cpu", tiny=True, out=tmp_path))
    (out,) = tmp_path.glob("cpu_*.jsonl")
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert list(dict.fromkeys(result["stage"] for result in results)) == list(bench.STAGES)
    assert all({"cpu", "device", "torch", "threads", "date"} <= set(result) for result in results)
    named = {result["what"]: result for result in results}
    first, second = named["nanoGPT, tiny x 3"], named["gpt2, tiny x 3"]
    assert first["tokens/s"] == pytest.approx(3 * 16 / (first["ms"] * 1e-3))
    assert named["gpt2 / nanoGPT, tiny"]["same batch"] == pytest.approx(first["ms"] / second["ms"])
    both = [named[f"{who} for a GPU"] for who in ("ours", "nanoGPT")]
    assert both[0]["goal"] == max(result["curve"][-1][1] for result in both)


def test_the_interval_is_the_paired_one_of_student() -> None:
    for freedom, quantile in enumerate(compare.T_95, start=1):
        scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(math.pi * freedom)
        width = quantile / 1000
        middles = ((i + 0.5) * width for i in range(1000))  # the midpoint rule, over Student's density
        inside = 2 * width * sum(scale * (1 + t * t / freedom) ** (-(freedom + 1) / 2) for t in middles)
        assert inside == pytest.approx(0.95, abs=1e-4), freedom
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t of two degrees of freedom 4.303.
    assert compare.interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))


def curves(*shifts: float) -> list[compare.Curve]:
    return [compare.Curve([4 + s, 3 + s, 2 + s], [0.0, 70.0, 140.0], [0.0, 1.0, 2.0], 70.0) for s in shifts]


def test_the_table() -> None:
    for loss, expected in {3.5: 50, 3.0: 100, 2.5: 250, 2.0: 400, 5.0: 0, 1.9: math.inf}.items():
        assert compare.amount_until(loss, [4.0, 3.0, 2.0], [0.0, 100.0, 400.0]) == expected
    lines = compare.table(curves(0.0, 0.2), curves(1.0, 1.3)).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["1", "2"]
    assert lines[4].split() == ["mean", "2.1000", "3.1500", "+1.0500"]
    assert lines[5] == "with 95 % confidence B - A is between +0.4147 and +1.6853: A is better"
    assert lines[-3].split() == ["tokens", "to", "3.1500", "66.5", "140.0"]  # A's mean curve: 4.1, 3.1, 2.1
    assert "B is better" in compare.table(curves(1.0, 1.3), curves(0.0, 0.2))
    assert "no difference is seen" in compare.table(curves(0.0, 0.2), curves(-0.4, 0.7))


def test_commands(tmp_path: Path) -> None:
    expected = [f"{ROOT}/train.py", f"{ROOT}/configs/quickstart.toml", "--train.learning_rate", "0.01"]
    assert compare.command_of(f"{ROOT}:configs/quickstart.toml --train.learning_rate 0.01") == expected
    with pytest.raises(UserError, match="there is no"):
        compare.command_of(f"{tmp_path}:configs/quickstart.toml")


@pytest.mark.long
def test_a_rate_of_nothing_learns_nothing(corpus_file: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "tiny.toml").write_text("[train]\nseed = 1\n")
    way = f"{tmp_path / 'tiny.toml'} {' '.join(tiny_run(corpus_file, tmp_path / 'unused', train__max_steps=8))}"
    monkeypatch.setattr(sys, "argv", ["compare.py", way, f"{way} --train.learning_rate 1e-9", "--ranks", "0", "2"])
    compare.main()
    assert capsys.readouterr().out.count(": A is better") == 1


@pytest.mark.parametrize(
    "there, missing", [((), "NVIDIA GPU"), (("nvidia-smi",), "gcc or clang"), (("nvidia-smi", "gcc"), "Python.h")]
)
def test_make_gpu_asks_for_what_it_needs_before_it_installs(there: tuple, missing: str, tmp_path: Path) -> None:
    for name in there:
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    make = [shutil.which("make"), "-f", ROOT / "Makefile", "gpu", "PYTHON=no-python"]
    ended = subprocess.run(make, cwd=tmp_path, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert ended.returncode == 2 and missing in ended.stdout
    assert len(list(tmp_path.iterdir())) == len(there)
