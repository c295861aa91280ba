"""The benchmarks run in tiny sizes, and their baseline, nanoGPT, learns what our GPT-2 learns."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bench, first_run, nanogpt
from model import GPT, GPTConfig
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
    idx = batches[0, 0]
    assert theirs.eval().generate(idx[:, :4], 7).equal(ours.eval().generate(idx[:, :4], 7, temperature=0))


def test_nanogpt_is_fed_and_evaluated_as_described(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    inputs, targets = nanogpt.batch(path, 50, 7, torch.device("cpu"))
    assert inputs.equal(inputs[:, :1] + torch.arange(7)) and targets.equal(inputs + 1) and targets.max() <= 99

    model, tokens = nanogpt.NanoGPT(nanogpt.Config(2, 3, 48, 11, 17)), torch.randint(17, (1, 11 * 3 + 5))
    pairs = zip(tokens[:, :-1].split(11, dim=1), tokens[:, 1:].split(11, dim=1), strict=True)
    total = sum(model(x, y)[1].item() * y.numel() for x, y in pairs)
    assert nanogpt.exact_loss(model, tokens[0]) == pytest.approx(total / 37, rel=1e-5)
    assert nanogpt.learning_rate_at(600, 1.0, max_steps=1100) == pytest.approx(0.55)


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


def test_seeds_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    heads = {"induction_control": [[0.0, 0.1], [0.25, 0.5]], "previous": [[0.0, 0.75], [0.5, None]]}
    heads |= {"induction": [[0.0, 0.1], [0.75, 0.875]], "entropy": [[0.0, 0.25], [0.5, 0.25]]}
    losses = {3: 1.5, 7: 2.0, 11: 4.0}
    seeds = iter(losses)
    commands = []

    def train(*command: object) -> list[dict]:
        commands.append(command)
        line = {"step": 13, "val_loss": 0.0, "val_bits_per_byte": losses[next(seeds)], "heads": heads}
        return [line | {"train_seconds": 5.0}, {"step": 13, "sample": "def"}, {"process seconds": 7.0}]

    monkeypatch.setattr(first_run, "train", train)
    monkeypatch.setattr(sys, "argv", ["first_run.py", "--seeds", "3", "7", "11", "--options=--train.dtype float32"])
    first_run.main()
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown[1] == ["3", "1.500", "0.500", "0.750", "0.250", "5.000"]
    assert [line[:2] for line in shown[4:7]] == [["median", "2.000"], ["least", "1.500"], ["most", "4.000"]]
    assert shown[9:11] == [["3", "13:", "1.500", "0.50"], ["'def'"]]
    assert [command[3] for command in commands] == [3, 7, 11]
    assert all(command[-2:] == ("--train.dtype", "float32") for command in commands)


@pytest.mark.long
@pytest.mark.parametrize("script", ["bench", "compare", "first_run", "memory"])
def test_each_script_starts_from_the_command_line(script: str) -> None:
    """Where nothing has made the modules of this project known before."""
    command = [sys.executable, f"benchmarks/{script}.py", "--help"]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ran.returncode == 0 and "usage: " in ran.stdout, ran.stderr
