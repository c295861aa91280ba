"""Training: it learns, it resumes to the same bits, and nothing that only looks on changes it."""

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sample
import train
from configs.script import run_script, visible
from data.batches import IGNORE
from model import GPT
from model.families import FAMILIES
from tests.conftest import make_gpt, metrics, often, same_bits, tiny_run, weights
from training.config import TrainConfig
from training.device import set_seed
from training.optimizer import make_optimizer


def test_a_run_from_text_to_sample(run, corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    changes = {"train__max_steps": 80, "train__learning_rate": 0.02, "train__eval_every": 40, "model__dropout": 0.0}
    result = run(train, *tiny_run(corpus_file, out, **changes))
    assert result.exit_code == 0
    val_loss = metrics(out, "val_loss")
    assert list(val_loss) == [0, 40, 80]
    assert abs(val_loss[0] - math.log(257)) < 0.1
    assert val_loss[80] < 0.6 * val_loss[0]
    bits = metrics(out, "val_bits_per_byte")
    assert bits[80] == pytest.approx(val_loss[80] / math.log(2), rel=1e-6)  # a token is a byte here
    logged = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "train_loss", "lr", "grad_norm", "tokens", "tokens_per_second"} == set(logged[2])
    assert {"step", "sample"} == set(logged[1])
    assert {"step", "val_loss", "val_bits_per_byte", "train_seconds", "heads"} == set(logged[0])
    assert metrics(out, "tokens")[80] == 80 * 3 * 2 * 11
    for said in ("device: cpu", "A sample of what it writes:", f"sample.py {out}"):
        assert said in result.out
    for name in ("config.json", "model.safetensors", "tokenizer.json", "optimizer.safetensors", "manifest.json"):
        assert (out / "checkpoints" / "step-00000080" / name).is_file()


def test_the_same_run_twice_gives_the_same_bits(run, straight: Path, corpus_file: Path, tmp_path: Path) -> None:
    run(train, *tiny_run(corpus_file, tmp_path / "again"))
    assert same_bits(weights(straight), weights(tmp_path / "again"))
    run(train, *tiny_run(corpus_file, tmp_path / "other", train__seed=2))
    assert not same_bits(weights(straight), weights(tmp_path / "other"))


def test_resume_and_resume_again_give_the_same_bits(run, straight: Path, corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "broken"
    assert run(train, *tiny_run(corpus_file, out, train__schedule="wsd", train__decay_fraction=0)).exit_code == 0
    longer = tmp_path / "longer"
    steps = {"train__schedule": "wsd", "train__decay_fraction": 0}
    run(train, *tiny_run(corpus_file, longer, **steps, train__max_steps=5, train__checkpoint_every=100))
    for max_steps in (7, 12):
        result = run(train, "--resume", longer, "--train.max_steps", max_steps)
        assert result.exit_code == 0 and "resumed from" in result.out
    assert same_bits(weights(out), weights(longer))
    for name in ("train_loss", "lr", "grad_norm"):
        assert metrics(out, name) == metrics(longer, name)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__eval_every": 3},
        {"train__log_every": 5},
        {"train__checkpoint_every": 5},
        {"train__eval_tokens": 50},
        {"train__keep_checkpoints": 1},
        {"train__sample_tokens": 0},
        {"train__sample_tokens": 29, "train__sample_prompt": "7 is"},
    ],
    ids=str,
)
def test_looking_changes_nothing(run, straight: Path, corpus_file: Path, tmp_path: Path, changes: dict) -> None:
    run(train, *tiny_run(corpus_file, tmp_path / "other", **changes))
    assert same_bits(weights(straight), weights(tmp_path / "other"))


def test_accumulated_loss_is_the_mean_over_all_tokens() -> None:
    model, idx = make_gpt(dropout=0.0), torch.randint(17, (6, 12))
    inputs, targets = idx[:, :-1], idx[:, 1:]
    whole = train.next_token_loss(model, inputs, targets, torch.float32) / targets.numel()
    whole.backward()
    expected = model.blocks[0].attention.q_proj.weight.grad.clone()
    model.zero_grad()
    parts = [
        train.next_token_loss(model, x, y, torch.float32) / targets.numel()
        for x, y in zip(inputs.split(2), targets.split(2), strict=True)
    ]
    for part in parts:
        part.backward()
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(model.blocks[0].attention.q_proj.weight.grad, expected)
    torch.testing.assert_close(whole, torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()))


def test_splitting_a_batch_into_micro_batches_changes_rounding_only(run, corpus_file: Path, tmp_path: Path) -> None:
    for out, batch_size, accum in (("one", 6, 1), ("two", 3, 2), ("six", 1, 6)):
        changes = {"train__batch_size": batch_size, "train__grad_accum_steps": accum, "model__dropout": 0.0}
        run(train, *tiny_run(corpus_file, tmp_path / out, **changes))
    for out in ("two", "six"):
        for name, tensor in weights(tmp_path / "one").items():
            torch.testing.assert_close(tensor, weights(tmp_path / out)[name], rtol=1e-3, atol=2e-5)


def test_the_logged_loss_is_the_mean_over_the_step(run, uncertified, corpus_file: Path, tmp_path: Path) -> None:
    seen = []
    loss = train.next_token_loss

    def spy(model: GPT, inputs: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        result = loss(model, inputs, targets, dtype)
        if model.training:
            seen.append(result.item() / targets.numel())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "next_token_loss", spy)
        run(train, *tiny_run(corpus_file, tmp_path / "run"))
    for step, logged in metrics(tmp_path / "run", "train_loss").items():
        assert logged == pytest.approx(sum(seen[2 * step - 2 : 2 * step]) / 2, rel=1e-6)


def test_targets_to_ignore_have_no_loss() -> None:
    model, idx = make_gpt().eval(), torch.randint(17, (2, 12))
    targets = idx[:, 1:].clone()
    targets[1] = IGNORE
    loss = train.next_token_loss(model, idx[:, :-1], targets, torch.float32)
    torch.testing.assert_close(loss, train.next_token_loss(model, idx[:1, :-1], targets[:1], torch.float32))


@pytest.mark.parametrize("family", often(*list(FAMILIES)[::-1]))
def test_a_family_trains_resumes_and_samples(run, family: str, corpus_file: Path, tmp_path: Path) -> None:
    changes = {"model__family": family, "model__n_embd": 18, "train__schedule": "wsd", "train__decay_fraction": 0}
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    result = run(train, *tiny_run(corpus_file, straight, **changes))
    assert result.exit_code == 0 and f"model:  {family}, " in result.out and "causal: yes" in result.out
    assert run(train, *tiny_run(corpus_file, broken, **changes, train__max_steps=5)).exit_code == 0
    assert run(train, "--resume", broken, "--train.max_steps", "12").exit_code == 0
    weights = [GPT.from_pretrained(out).state_dict() for out in (straight, broken)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    texts = [
        run(sample, straight, "--seed", "1", "--max_new_tokens", "30", "--dtype", "float32", *extra).out
        for extra in ([], ["--no_cache"])
    ]
    assert texts[0] == texts[1]


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3", "nanochat"])  # between them they have all parts that are new
def test_a_family_compiles(run, family: str, corpus_file: Path, tmp_path: Path) -> None:
    changes = {"model__family": family, "model__n_embd": 18, "train__compile": "true", "train__max_steps": 3}
    result = run(train, *tiny_run(corpus_file, tmp_path / "run", **changes))
    assert result.exit_code == 0, result.err


def test_what_is_drawn_on_host_and_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(manual_seed=seeded.append))
    for device in ("cpu", "cuda"):
        set_seed(torch.device(device), 2**62 + 5)  # as seed_for has them
        drawn = torch.rand(3)
        torch.manual_seed(2**62 + 5)
        assert torch.equal(drawn, torch.rand(3))
    assert seeded == [2**62 + 5]


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


@pytest.mark.long
def test_no_setting_of_the_process_changes_a_bit(corpus_file: Path, tmp_path: Path) -> None:
    root = Path(train.__file__).parent
    settings = {"PYTHONHASHSEED": ("0", "1"), "TZ": ("UTC", "Asia/Tokyo"), "LANG": ("C", "C.UTF-8")}
    for number in (0, 1):
        environment = os.environ | {name: pair[number] for name, pair in settings.items()}
        arguments = tiny_run(corpus_file, tmp_path / str(number))
        work = tmp_path if number else root
        subprocess.run([sys.executable, root / "train.py", *arguments], env=environment, cwd=work, check=True)
    assert same_bits(weights(tmp_path / "0"), weights(tmp_path / "1"))
    for key in ("train_loss", "val_loss", "grad_norm"):
        assert metrics(tmp_path / "0", key) == metrics(tmp_path / "1", key)


def test_deterministic_kernels_are_asked_for_and_noted(run, corpus_file: Path, tmp_path: Path) -> None:
    try:
        assert run(train, *tiny_run(corpus_file, tmp_path / "run", train__deterministic="true")).exit_code == 0
        assert torch.are_deterministic_algorithms_enabled()
        manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000012" / "manifest.json").read_text())
        assert manifest["environment"]["deterministic"] == "true"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_loss_is_one_graph_in_training_and_one_in_evaluation(family: str, dtype: torch.dtype) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    loss_fn = torch.compile(train.next_token_loss, dynamic=False, fullgraph=True, backend=backend)
    model = make_gpt(family=family, n_embd=18, dropout=0.1 if family == "gpt2" else 0.0)
    optimizer = make_optimizer(model, TrainConfig())
    for place in range(5):
        ids = torch.randint(17, (3, 12))
        if place % 2:  # an evaluation in between
            model.eval()
            with torch.no_grad():
                loss_fn(model, ids[:, :-1], ids[:, 1:], dtype)
        model.train()
        loss_fn(model, ids[:, :-1], ids[:, 1:], dtype).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(graphs) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_certified_is_the_program_that_trains(run, corpus_file, tmp_path, monkeypatch, dtype: str) -> None:
    graphs, certify_it = [], train.certify

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    def certify(*arguments: object) -> dict:
        certificate = certify_it(*arguments)
        assert len(graphs) == 2  # one with gradients and dropout, one without
        return certificate

    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(train, "certify", certify)
    options = {"train__compile": "true", "train__dtype": dtype, "train__max_steps": 3, "train__eval_every": 2}
    assert run(train, *tiny_run(corpus_file, tmp_path / "out", **options)).exit_code == 0
    assert len(graphs) == 2


def test_running_out_of_memory_says_what_needs_less(run, corpus_file, tmp_path, monkeypatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(train, "next_token_loss", full)
    again = "--train.activation_checkpointing true"
    for size, less in ((9, f"{again} and --train.batch_size 3 --train.grad_accum_steps 6"), (1, again)):
        result = run(train, *tiny_run(corpus_file, tmp_path / str(size), train__batch_size=size))
        assert result.exit_code == 2
        assert f"out of memory with {size} sequences at once: try {less}" in result.err.splitlines()[-1]
    result = run(train, *tiny_run(corpus_file, tmp_path / "huge", model__n_embd=3 * 2**17))
    assert result.exit_code == 2 and "out of memory" in result.err.splitlines()[-1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model__context_length": 4000}, "training split has 3,743 tokens and needs context_length + 1 = 4,001"),
        ({"model__n_head": 4}, "n_embd must be a multiple of n_head, got n_embd=15 and n_head=4"),
        ({"train__device": "cuda:9"}, "device 'cuda:9' cannot be used"),
        ({"train__device": "gpu"}, "device 'gpu' cannot be used"),
        ({"data__tokenizer": "gtp2"}, "unknown tokenizer 'gtp2'"),
        ({"data__source": "nowhere.txt"}, "no text found at 'nowhere.txt'"),
    ],
)
def test_mistakes_get_one_sentence_and_leave_no_run(run, corpus_file, tmp_path, changes: dict, message: str) -> None:
    result = run(train, *tiny_run(corpus_file, tmp_path / "run", **changes))
    assert result.exit_code == 2
    assert message in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    assert not (tmp_path / "run").exists()


def test_samples_are_of_each_evaluation_and_change_nothing_else(run, straight: Path, corpus_file, tmp_path) -> None:
    texts, wanted = metrics(straight, "sample"), {"train__sample_tokens": 5, "train__sample_prompt": "7 is"}
    assert list(texts) == list(metrics(straight, "val_loss")) and len(texts[12]) > 2
    result = run(train, *tiny_run(corpus_file, tmp_path / "other", **wanted))
    texts = metrics(tmp_path / "other", "sample")
    assert all(text.startswith("7 is") and len(text) <= 4 + 5 for text in texts.values()) and len({*texts.values()}) > 1
    assert f"{'':12} | {visible(' '.join(texts[4].split()))}" in result.out.splitlines()

    def others(out: Path) -> list[dict]:
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        of_time = ("tokens_per_second", "train_seconds")
        return [{name: x for name, x in line.items() if name not in of_time} for line in lines if "sample" not in line]

    run(train, *tiny_run(corpus_file, tmp_path / "none", train__sample_tokens=0))
    assert not metrics(tmp_path / "none", "sample")
    assert others(straight) == others(tmp_path / "other") == others(tmp_path / "none")
    assert same_bits(weights(straight), weights(tmp_path / "none"))


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_script(main)
