"""Training: it learns, it resumes to the same bits, and nothing that only looks on changes it."""

import json
import math
import shutil
import socket
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import sample
import train
from benchmarks.bench import flops_per_token
from cli.script import printable
from data.batches import IGNORE, Batches
from model import GPT, GPTConfig
from tests.conftest import make_gpt, metrics, same_bits, tiny_run, weights
from training.progress import Progress
from training.run import SHARP, SOFT


def test_a_run_from_text_to_sample(run, corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    changes = {"train__max_steps": 80, "train__learning_rate": 0.02, "train__eval_every": 40, "model__dropout": 0.0}
    result = run(train, *tiny_run(corpus_file, out, **changes)).ok()
    val_loss = metrics(out, "val_loss")
    assert list(val_loss) == [0, 40, 80]
    assert abs(val_loss[0] - math.log(257)) < 0.1
    assert val_loss[80] < 0.6 * val_loss[0]
    bits = metrics(out, "val_bits_per_byte")
    assert bits[80] == pytest.approx(val_loss[80] / math.log(2), rel=1e-6)  # a token is a byte here
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "train_loss", "lr", "grad_norm", "tokens", "tokens_per_second"} <= set(logged[1])
    heads = {"heads", "heads_proof"}
    assert {"step", "val_loss", "val_bits_per_byte", "tokens", "train_seconds", *heads, "sample"} <= set(logged[0])
    assert metrics(out, "tokens")[80] == 80 * 3 * 2 * 11
    for said in ("device: cpu", "A sample of what it writes:", f"sample.py {out}"):
        assert said in result.out


def test_a_sharp_first_layer_is_where_a_qwen3_begins(run, corpus_file: Path, tmp_path: Path) -> None:
    changes = {"train__sharp_first_layer": "true", "train__max_steps": 1, "train__learning_rate": 1e-9}
    shape = {"model__family": "qwen3", "model__bias": "false", "model__dropout": 0.0, "model__n_embd": 18}
    assert run(train, *tiny_run(corpus_file, tmp_path / "run", **changes, **shape)).exit_code == 0
    for name, tensor in weights(tmp_path / "run", 1).items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            assert tensor.sub(SHARP if "layers.0." in name else SOFT).abs().max() < 1e-6


def test_another_seed_gives_another_run(run, straight: Path, corpus_file: Path, tmp_path: Path) -> None:
    run(train, *tiny_run(corpus_file, tmp_path / "seed", train__seed=2, train__max_steps=4))
    assert not same_bits(weights(straight, 4), weights(tmp_path / "seed", 4))


def test_samples_are_of_each_evaluation_and_change_nothing_else(run, straight: Path, corpus_file, tmp_path) -> None:
    wanted = {"train__sample_tokens": 5, "train__sample_prompt": "7 is"}
    result = run(train, *tiny_run(corpus_file, tmp_path / "other", **wanted))
    texts = metrics(tmp_path / "other", "sample")
    assert list(texts) == list(metrics(straight, "val_loss")) and len({*texts.values()}) > 1
    assert all(text.startswith("7 is") and len(text) <= 4 + 5 for text in texts.values())
    assert f"{'':12} | {printable(' '.join(texts[4].split()))}" in result.out.splitlines()
    run(train, *tiny_run(corpus_file, tmp_path / "none", train__sample_tokens=0))
    assert not metrics(tmp_path / "none", "sample")
    for out in (tmp_path / "other", tmp_path / "none"):
        assert same_bits(weights(straight), weights(out))
        assert metrics(straight, "train_loss") == metrics(out, "train_loss")
        assert metrics(straight, "heads") == metrics(out, "heads")


def test_the_loss_is_the_cross_entropy_of_targets_that_are_not_ignored() -> None:
    model, idx = make_gpt().eval(), torch.randint(17, (2, 12))
    inputs, targets = idx[:, :-1], idx[:, 1:].clone()
    targets[1, 3:] = IGNORE
    expected = torch.nn.functional.cross_entropy(model(inputs)[targets != IGNORE], targets[targets != IGNORE])
    loss = train.next_token_loss(model, inputs, targets, torch.float32)
    torch.testing.assert_close(loss / (targets != IGNORE).sum(), expected)


def test_splitting_a_batch_into_micro_batches_changes_rounding_only(run, corpus_file: Path, tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    for out, batch_size, accum in ((whole, 6, 1), (split, 2, 3)):
        changes = {"train__batch_size": batch_size, "train__grad_accum_steps": accum, "model__dropout": 0.0}
        run(train, *tiny_run(corpus_file, out, **changes))
    assert metrics(split, "train_loss") == pytest.approx(metrics(whole, "train_loss"), rel=1e-4)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(weights(split)[name], tensor, rtol=1e-3, atol=2e-5)


def test_a_growing_batch_is_one_line_of_train_and_counted_also_after_a_resume(
    run, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(train.__file__).read_text()
    changed = source.replace("num_micro_batches = c.grad_accum_steps", "num_micro_batches = 2 + step // 3")
    assert changed != source
    growing = ModuleType("growing")
    exec(compile(changed, train.__file__, "exec"), vars(growing))
    numbers, read = [], Batches.__call__
    monkeypatch.setattr(
        Batches, "__call__", lambda self, number, device: numbers.append(number) or read(self, number, device)
    )
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    assert run(growing, *tiny_run(corpus_file, whole, train__max_steps=8)).exit_code == 0
    batches = [0, 2, 4, 6, 9, 12, 15, 19, 23, 27, 32]  # that are read when so many steps are made
    assert numbers == [0, *range(23)]  # the proof of the loss reads the first one
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3 + 8 and all(line["tokens"] == batches[line["step"]] * 3 * 11 for line in lines)
    assert all(abs(loss - math.log(257)) < 1 for loss in metrics(whole, "train_loss").values())  # a mean

    shutil.copytree(whole, halted)
    shutil.rmtree(halted / "checkpoints" / "step-00000008")
    for directory, step, max_steps in ((halted, 4, 8), (whole, 8, 10)):
        numbers.clear()
        assert run(growing, "--resume", directory, "--train.max_steps", max_steps).exit_code == 0
        assert numbers == [0, *range(batches[step], batches[max_steps])]
        assert metrics(directory, "tokens")[max_steps] == batches[max_steps] * 3 * 11
    for name in ("model", "optimizer"):
        assert same_bits(weights(whole, 8, name), weights(halted, 8, name))


def test_nothing_is_asked_of_a_network_and_no_secret_is_kept(run, corpus_file, tmp_path, monkeypatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setenv("TRIL_CANARY_TOKEN", "canary-5f1d")
    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    assert run(train, *tiny_run(corpus_file, tmp_path / "run")).exit_code == 0
    assert run(sample, tmp_path / "run", "--max_new_tokens", "5").exit_code == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 9 and not any(b"canary-5f1d" in path.read_bytes() for path in files)


def test_deterministic_kernels_are_asked_for_and_noted(run, corpus_file: Path, tmp_path: Path) -> None:
    try:
        assert run(train, *tiny_run(corpus_file, tmp_path / "run", train__deterministic="true")).exit_code == 0
        assert torch.are_deterministic_algorithms_enabled()
        manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000012" / "manifest.json").read_text())
        assert manifest["environment"]["deterministic"] == "true"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model__context_length": 3841}, "training split has 3,841 tokens and needs context_length + 1 = 3,842"),
        ({"train__device": "cuda:9"}, "device 'cuda:9' cannot be used"),
        ({"model__n_embd": 3 * 2**17}, "out of memory, docs/train.md says what needs less"),
    ],
)
def test_mistakes_get_one_sentence_and_leave_no_run(run, corpus_file, tmp_path, changes: dict, message: str) -> None:
    result = run(train, *tiny_run(corpus_file, tmp_path / "run", **changes)).refused(message)
    assert "Traceback" not in result.err and not (tmp_path / "run").exists()


def test_speed_counts_training_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("training.progress.time.perf_counter", lambda: now[0])
    with Progress(0, 3, 5.0, 10, device=torch.device("cpu")) as progress:
        for tokens in (5, 7, 7, 9):
            now[0] += 2.0
            progress.made_step(tokens)
        with progress.paused("evaluating"):
            now[0] += 50.0
        speed = progress.speed(loss=1.0)
    assert (progress.step, progress.train_seconds) == (4, 13.0)
    assert speed == {"tokens": 31, "tokens_per_second": 3.5}
    assert progress.line.postfix == "loss 1.000, 4 tokens/s"


@pytest.mark.parametrize("family, head_dim", [("gpt2", 14), ("llama", 22), ("qwen3", 10), ("nanochat", 14)])
def test_flops_are_those_of_the_formula_and_six_for_each_weight_of_a_vector(family: str, head_dim: int) -> None:
    """PaLM counts all weights as if they were of matrices, and PyTorch counts products alone."""
    shape = {"n_layer": 2, "n_head": 3, "n_kv_head": 1, "n_embd": 42, "head_dim": head_dim, "context_length": 11}
    model = GPT(GPTConfig(family, **shape, vocab_size=67, tied=family != "nanochat"))
    inputs, targets = torch.randint(67, (2, 5, 11))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # no kernel counts the formula's
        train.next_token_loss(model, inputs, targets, torch.float32).backward()
    vectors = sum(len(parameter) for parameter in model.blocks.parameters() if parameter.dim() == 1)
    assert flops_per_token(model) == counter.get_total_flops() / inputs.numel() + 6 * vectors
