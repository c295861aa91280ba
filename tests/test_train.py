"""Training: it learns, it resumes to the same bits, and nothing that only looks on changes it."""

import copy
import fcntl
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sample
import train
from configs import run_script, visible
from data.batches import IGNORE
from model import GPT
from model.families import FAMILIES
from model.load import load_tensors
from tests.conftest import make_gpt, metrics, often, same_bits, sign, tiny_run, weights
from tests.crash import in_child
from training.config import MAY_CHANGE, TrainConfig, TrainError
from training.device import attention_kernel, environment, peak_tokens_per_second, set_seed
from training.optimizer import FiniteGuard, NonFiniteLoss, learning_rate_at, make_optimizer
from training.progress import Interrupt, Outliving, Progress, duration, rehearse, time_line
from training.run import refuse_changes, tables


@pytest.fixture
def uncertified(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count the calls of the loss: no certificate asks it too, nor what memory or time it takes."""
    monkeypatch.setattr(train, "certify", lambda *arguments: {"causal": "not asked"})
    monkeypatch.setattr(train, "memory_line", lambda *arguments: "")
    monkeypatch.setattr(train, "rehearse", lambda *arguments: (0.0, 0.0))


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_resumed_run_is_the_same(
    run, uncertified, straight: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    out = tmp_path / "interrupted"
    loss = train.next_token_loss
    steps = []
    signal.signal(number, signal.SIG_DFL)  # whatever started the tests may have asked to ignore it

    def interrupting(model: GPT, *arguments: object, **options: object) -> torch.Tensor:
        steps.append(model.training)
        if sum(steps) == 13 and model.training:
            os.kill(os.getpid(), number)  # in the middle of step 6
        return loss(model, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(train, "next_token_loss", interrupting)
        result = run(train, *tiny_run(corpus_file, out))
    assert result.exit_code == 75
    assert result.err.splitlines()[-1].startswith("train.py: saved step 7; continue with: ")
    assert (out / "checkpoints" / "step-00000007").is_dir()
    assert run(train, "--resume", out).exit_code == 0
    assert same_bits(weights(straight), weights(out))
    assert metrics(straight, "train_loss") == metrics(out, "train_loss")
    assert metrics(straight, "val_loss") == metrics(out, "val_loss")


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


def test_gradients_are_clipped_to_their_norm(run, corpus_file: Path, tmp_path: Path) -> None:
    norms, clip = [], torch.nn.utils.clip_grad_norm_

    def spy(parameters: object, max_norm: float) -> torch.Tensor:
        norms.append(max_norm)
        return clip(parameters, max_norm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", spy)
        run(train, *tiny_run(corpus_file, tmp_path / "clipped", train__grad_clip=0.25, train__max_steps=2))
        run(train, *tiny_run(corpus_file, tmp_path / "free", train__grad_clip=0, train__max_steps=2))
    assert norms == [0.25, 0.25, math.inf, math.inf]


def test_targets_to_ignore_have_no_loss() -> None:
    model, idx = make_gpt().eval(), torch.randint(17, (2, 12))
    targets = idx[:, 1:].clone()
    targets[1] = IGNORE
    loss = train.next_token_loss(model, idx[:, :-1], targets, torch.float32)
    torch.testing.assert_close(loss, train.next_token_loss(model, idx[:1, :-1], targets[:1], torch.float32))


def test_a_loss_that_is_not_finite_stops_before_the_update(
    run, uncertified, straight: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = train.next_token_loss

    def broken(model: GPT, inputs: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        steps.append(model.training)
        return loss(model, inputs, targets, dtype) * (math.nan if sum(steps) > 2 * 6 else 1)

    steps = []
    monkeypatch.setattr(train, "next_token_loss", broken)
    result = run(train, *tiny_run(corpus_file, tmp_path / "nan", train__log_every=100))
    assert result.exit_code == 3
    assert "not finite in step 6 (micro-batch 0: the loss itself): its update was not" in result.err.splitlines()[-1]
    names = sorted(path.name for path in (tmp_path / "nan" / "checkpoints").iterdir())
    assert names == ["step-00000004"]
    assert same_bits(weights(straight, 4), weights(tmp_path / "nan", 4))


def test_what_is_not_finite_is_named(run, uncertified, corpus_file: Path, tmp_path: Path, monkeypatch) -> None:
    loss, calls = train.next_token_loss, []

    def weights_break(model: GPT, *rest: object, **options: object) -> torch.Tensor:
        calls.append(model.training)
        if sum(calls) == 2 * 6 + 2:
            model.blocks[1].mlp.up_proj.weight.data[0] = math.inf
        return loss(model, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(train, "next_token_loss", weights_break)
        result = run(train, *tiny_run(corpus_file, tmp_path / "output"))
    assert result.exit_code == 3
    assert "in step 6 (micro-batch 0: the output of blocks.1.mlp.up_proj): " in result.err.splitlines()[-1]

    def gradients_break(model: GPT, *rest: object, **options: object) -> torch.Tensor:
        return loss(model, *rest, **options) + (0 * model.final_norm.bias.sum()).sqrt()  # whose derivative is infinite

    with monkeypatch.context() as patch:
        patch.setattr(train, "next_token_loss", gradients_break)
        result = run(train, *tiny_run(corpus_file, tmp_path / "gradient"))
    assert "in step 0 (micro-batch 0: the gradient of final_norm.bias): " in result.err.splitlines()[-1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_guard_freezes_weights_from_the_first_bad_number_on(bad: float) -> None:
    model = make_gpt()
    optimizer = make_optimizer(model, TrainConfig())
    guard = FiniteGuard(optimizer, torch.device("cpu"), str)
    before = None
    for step, number in enumerate([1.0, 2.0, bad, 3.0]):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if not math.isfinite(number):
            before = [parameter.clone() for parameter in model.parameters()]
            guard.check()
        guard.watch(step, torch.tensor(number))
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    with pytest.raises(NonFiniteLoss, match="step 2"):
        guard.check()


def test_loss_scaling_in_float16_resumes_to_the_same_bits(run, corpus_file, tmp_path, monkeypatch) -> None:
    half = {"train__dtype": "float16", "train__schedule": "wsd", "train__decay_fraction": 0}
    run(train, *tiny_run(corpus_file, tmp_path / "straight", **half))
    run(train, *tiny_run(corpus_file, tmp_path / "broken", **half, train__max_steps=5))
    trainer = json.loads((tmp_path / "broken" / "checkpoints" / "step-00000005" / "trainer.json").read_text())
    assert trainer["scaler"]["_growth_tracker"] == 5
    restored = []
    load = torch.amp.GradScaler.load_state_dict
    spy = lambda scaler, state: restored.append(state) or load(scaler, state)  # noqa: E731
    monkeypatch.setattr(torch.amp.GradScaler, "load_state_dict", spy)
    run(train, "--resume", tmp_path / "broken", "--train.max_steps", 12)
    assert restored == [trainer["scaler"]]
    assert same_bits(weights(tmp_path / "straight"), weights(tmp_path / "broken"))


def test_a_run_killed_before_its_first_checkpoint_begins_again(run, straight: Path, corpus_file, tmp_path) -> None:
    out = tmp_path / "young"
    run(train, *tiny_run(corpus_file, out, train__max_steps=12))
    for path in (out / "checkpoints").iterdir():
        shutil.rmtree(path)
    assert run(train, "--resume", out).exit_code == 0
    assert same_bits(weights(straight), weights(out))
    assert metrics(straight, "train_loss") == metrics(out, "train_loss")


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


def test_a_finished_run_has_nothing_to_do(run, straight: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in (straight / "checkpoints").rglob("*"))
    result = run(train, "--resume", straight)
    assert result.exit_code == 0
    assert "is already at step 12, of 12: nothing to do" in result.out
    assert sorted((path, path.stat().st_mtime_ns) for path in (straight / "checkpoints").rglob("*")) == before


@pytest.mark.parametrize(
    "option, message",
    [
        ("--model.n_layer 3", "a resumed run cannot change model.n_layer: it began with 2, now 3"),
        ("--train.seed 5", "cannot change train.seed: it began with 1337, now 5"),
        ("--train.learning_rate 0.5", "cannot change train.learning_rate"),
        ("--data.tokenizer chars", "cannot change data.tokenizer: it began with 'bytes', now 'chars'"),
    ],
)
def test_a_resumed_run_stays_the_same_run(run, straight: Path, option: str, message: str) -> None:
    result = run(train, "--resume", straight, *option.split())
    assert result.exit_code == 2 and message in result.err
    assert len(result.err.splitlines()[-1]) <= 200


def test_a_resumed_run_may_change_what_does_not_change_its_numbers(run, straight: Path, tmp_path: Path) -> None:
    assert set(TrainConfig.__dataclass_fields__) >= MAY_CHANGE
    shutil.copytree(straight, tmp_path / "other")
    for directory in ("step-00000008", "step-00000012"):
        shutil.rmtree(tmp_path / "other" / "checkpoints" / directory)
    looks = ["--train.eval_every", "5", "--train.log_every", "3", "--train.checkpoint_every", "7"]
    assert run(train, "--resume", tmp_path / "other", *looks, "--train.keep_checkpoints", "1").exit_code == 0
    assert same_bits(weights(straight), weights(tmp_path / "other"))
    assert list(metrics(tmp_path / "other", "val_loss")) == [0, 4, 5, 10, 12]


def test_every_option_may_change_or_may_not() -> None:
    before = tables(train.Config())
    for table, content in before.items():
        for key, value in content.items():
            now = copy.deepcopy(before)
            now[table][key] = "something else"
            if table == "train" and key in MAY_CHANGE:
                refuse_changes(before, now)
            else:
                with pytest.raises(
                    TrainError, match=f"cannot change {table}.{key}: it began with {value!r}, now 'some"
                ):
                    refuse_changes(before, now)


def test_a_run_of_an_older_version_takes_the_defaults_of_what_is_new(
    run, straight: Path, corpus_file, tmp_path
) -> None:
    checkpoint, file = straight / "checkpoints" / "step-00000012", straight / "config.toml"
    trainer = json.loads((checkpoint / "trainer.json").read_text())
    del trainer["config"]["train"]["deterministic"]
    (checkpoint / "trainer.json").write_text(json.dumps(trainer))
    sign(checkpoint)
    file.write_text(re.sub("deterministic = .*\n", "", file.read_text()))
    assert run(train, "--resume", straight, "--train.max_steps", "13").exit_code == 0
    assert "deterministic = false" in file.read_text()
    file.write_text(file.read_text().replace("[train]", "[train]\nflux = 5"))
    result = run(train, "--resume", straight, "--train.max_steps", "14")
    assert result.exit_code == 2 and "config.toml: Unrecognized options: --train.flux=5" in result.err


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


@pytest.mark.long
def test_a_user_can_verify_that_a_resume_changes_no_bit(run, corpus_file: Path, tmp_path: Path, monkeypatch) -> None:
    arguments = ["--verify_resume", *tiny_run(corpus_file, tmp_path / "run", model__n_embd=150)]
    result = run(train, *arguments)
    assert result.exit_code == 0, result.err
    assert result.out.count("  killed after step ") >= 1 and "\nthe same bits: weights (SHA-256 " in result.out
    assert not (tmp_path / "run").exists()

    forgetful = tmp_path / "forgetful.py"
    forgetful.write_text(
        f"import sys; sys.path.insert(0, {str(Path(train.__file__).parent)!r})\n"
        "import train, training.run\n"
        "training.run.load_optimizer_tensors = lambda *rest: None\n"
        "train.run_script(train.main)\n"
    )
    monkeypatch.setattr("training.verify.TRAIN", forgetful)
    result = run(train, *arguments)
    assert result.exit_code == 2
    assert "the resumed run is another: " in result.err and "(a bug of tril)" in result.err

    (tmp_path / "short.txt").write_text("x")
    result = run(train, "--verify_resume", *tiny_run(tmp_path / "short.txt", tmp_path / "run"))
    assert result.exit_code == 2 and re.search("a run failed: .*short.txt is too short", result.err.splitlines()[-1])


def test_deterministic_kernels_are_asked_for_and_noted(run, corpus_file: Path, tmp_path: Path) -> None:
    try:
        assert run(train, *tiny_run(corpus_file, tmp_path / "run", train__deterministic="true")).exit_code == 0
        assert torch.are_deterministic_algorithms_enabled()
        manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000012" / "manifest.json").read_text())
        assert manifest["environment"]["deterministic"] == "true"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dropout, kernel", [(0.0, "flash_attention_for_cpu"), (0.1, "not fused")])
def test_the_attention_kernel_is_named(dropout: float, kernel: str) -> None:
    assert attention_kernel(make_gpt(dropout=dropout).train(), torch.float32) == kernel


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_loss_is_one_graph_in_training_and_one_in_evaluation(family: str) -> None:
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
                loss_fn(model, ids[:, :-1], ids[:, 1:], torch.float32)
        model.train()
        loss_fn(model, ids[:, :-1], ids[:, 1:], torch.float32).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(graphs) == 2


def test_a_longer_run_is_the_same_if_its_schedule_was_still_flat(run, corpus_file: Path, tmp_path: Path) -> None:
    wsd = {"train__schedule": "wsd", "train__decay_fraction": 0.5}
    assert run(train, *tiny_run(corpus_file, tmp_path / "long", train__max_steps=24, **wsd)).exit_code == 0
    assert run(train, *tiny_run(corpus_file, tmp_path / "short", train__max_steps=8, **wsd)).exit_code == 0
    shutil.rmtree(tmp_path / "short" / "checkpoints" / "step-00000008")
    longer = run(train, "--resume", tmp_path / "short", "--train.max_steps", 24)  # from step 4, where it begins to fall
    assert "not the run that" not in longer.out
    assert same_bits(weights(tmp_path / "long", 24), weights(tmp_path / "short", 24))
    longest = run(train, "--resume", tmp_path / "short", "--train.max_steps", 48)
    warning = "not the run that 48 steps from the start would have been: the learning rate, planned for 24, was 0.00033"
    assert warning in longest.out


def test_a_resumed_run_says_in_what_its_environment_differs(run, straight: Path, monkeypatch) -> None:
    result = run(train, "--resume", straight, "--train.max_steps", 13)
    assert "the last bits" not in result.out
    monkeypatch.setattr(train, "environment", lambda *rest: environment(*rest) | {"threads": "64"})
    result = run(train, "--resume", straight, "--train.max_steps", 14)
    assert "\nthe last bits will differ from those of a run without a break: threads 1 -> 64\n" in result.out


def test_a_resumed_run_refuses_another_text(run, corpus_file: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    run(train, *tiny_run(corpus_file, straight))
    corpus_file.write_text(corpus_file.read_text() + "one more line\n")
    result = run(train, "--resume", straight, "--train.max_steps", 13)
    assert result.exit_code == 2 and "is not the text this run began with" in result.err


def test_a_second_run_does_not_overwrite_the_first(run, straight: Path, corpus_file: Path) -> None:
    result = run(train, *tiny_run(corpus_file, straight))
    assert result.exit_code == 2
    assert f"already holds a run: continue it with --resume {straight}" in result.err


def test_two_processes_cannot_share_a_run(run, straight: Path) -> None:
    other = os.open(straight, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    result = run(train, "--resume", straight, "--train.max_steps", 13)
    os.close(other)
    assert result.exit_code == 2 and "is in use by another training process" in result.err
    assert run(train, "--resume", straight, "--train.max_steps", 13).exit_code == 0


def test_a_run_that_another_process_wrote_meanwhile_is_left_alone(run, corpus_file, tmp_path, monkeypatch) -> None:
    prepare = train.prepare

    def slow(config: object, **options: object) -> object:
        monkeypatch.setattr(train, "prepare", prepare)
        run(train, *tiny_run(corpus_file, tmp_path / "run", train__max_steps=4))
        return prepare(config, **options)

    monkeypatch.setattr(train, "prepare", slow)
    result = run(train, *tiny_run(corpus_file, tmp_path / "run"))
    assert result.exit_code == 2 and "another training process has written to" in result.err
    assert list(metrics(tmp_path / "run", "train_loss")) == [1, 2, 3, 4]


def test_a_signal_in_an_evaluation_breaks_it_off_and_a_resumed_run_makes_it(
    run, uncertified, straight: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "run", []
    loss = train.next_token_loss

    def interrupting(model: GPT, *arguments: object, **options: object) -> torch.Tensor:
        seen.append(model.training)
        if seen[-2:] == [True, False]:  # the first batch of the evaluation at step 4
            os.kill(os.getpid(), signal.SIGTERM)
        return loss(model, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(train, "next_token_loss", interrupting)
        result = run(train, *tiny_run(corpus_file, out))
    assert result.exit_code == 75 and "saved step 4;" in result.err
    assert seen[-2:] == [True, False]  # and no other batch of it
    assert list(metrics(out, "val_loss")) == [0]
    assert run(train, "--resume", out).exit_code == 0
    assert same_bits(weights(straight), weights(out))
    assert metrics(straight, "val_loss") == metrics(out, "val_loss")
    assert run(train, "--resume", out).out.count("nothing to do") == 1


def test_a_signal_in_the_last_evaluation_leaves_it_to_the_next_session(
    run, uncertified, straight: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, evaluate = tmp_path / "run", train.evaluate

    def interrupted(*arguments: object) -> float | None:
        if len(metrics(out, "val_loss")) == 3:  # at steps 0, 4 and 8
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", interrupted)
        result = run(train, *tiny_run(corpus_file, out))
    assert result.exit_code == 75 and "saved step 12;" in result.err
    assert "nothing to do" not in run(train, "--resume", out).out
    assert "nothing to do" in run(train, "--resume", out).out
    assert metrics(straight, "val_loss") == metrics(out, "val_loss")
    assert run(train, "--resume", out, "--train.max_steps", "16").exit_code == 0
    best = [json.loads((out / "checkpoints" / f"step-{step:08d}" / "trainer.json").read_text()) for step in (12, 16)]
    assert best[0]["best_step"] == 8 and best[1]["best_step"] == 16


def test_fewer_steps_than_are_made_leave_nothing_to_do(run, straight: Path) -> None:
    shutil.rmtree(straight / "checkpoints" / "step-00000012")
    for max_steps in (6, 7):
        result = run(train, "--resume", straight, "--train.max_steps", max_steps)
        assert result.exit_code == 0 and f"is already at step 8, of {max_steps}: nothing to do" in result.out


@pytest.mark.parametrize(
    "damage, left",
    [
        (b'{"step": 12, "train_loss"\0\0\0\0\n{"step": 12}\n', 12),
        (b"\xff\xfe{{{\n", 12),
        (b"[]\n", 12),
        (b'{"step": 9', 12),
        (None, 0),
    ],
)
def test_damaged_metrics_do_not_end_a_run(run, straight: Path, damage: bytes | None, left: int) -> None:
    path = straight / "metrics.jsonl"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + damage)
    result = run(train, "--resume", straight, "--train.max_steps", "14", "--train.log_every", "100")
    assert result.exit_code == 0, result.err
    assert list(metrics(straight, "train_loss")) == [*range(1, left + 1), 14]


def test_nobody_has_to_read_what_a_training_says(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        stream = Outliving(pipe)
        for _ in range(3):
            stream.write("step\n")
            stream.flush()
        assert not stream.isatty()


@pytest.mark.parametrize("place", ["prepare", "certify", "rehearse", "next_token_loss"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_signal_before_the_first_step_stops_at_once(
    run, straight: Path, corpus_file, tmp_path, monkeypatch, place: str, resumed: bool
) -> None:
    out = straight if resumed else tmp_path / "new"
    arguments = ["--resume", out, "--train.max_steps", "13"] if resumed else tiny_run(corpus_file, out)
    before = sorted((straight / "checkpoints").rglob("*"))

    def interrupted(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("went on")

    def work() -> None:
        monkeypatch.setattr(train, place, interrupted)
        sys.exit(run(train, *arguments).exit_code)

    said = tmp_path / "said"
    assert in_child(work, said=said) == 75  # in a process of its own, as a run holds its lock until its process ends
    message = said.read_text().splitlines()[-1]
    assert "SIGTERM before a step was made: nothing to save, the same command starts again" in message
    assert sorted((straight / "checkpoints").rglob("*")) == before
    assert run(train, *arguments).exit_code == 0


def test_a_signal_whose_exception_gets_lost_is_obeyed_before_the_first_step(
    run, straight: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certify = train.certify

    def swallowing(*arguments: object) -> dict:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        return certify(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train, "certify", swallowing)
        result = run(train, *tiny_run(corpus_file, tmp_path / "run"))
    assert result.exit_code == 75 and "SIGTERM before a step was made" in result.err.splitlines()[-1]
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


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


def test_a_loss_spike_is_logged_with_its_windows(run, uncertified, corpus_file, tmp_path, monkeypatch) -> None:
    loss, calls, seen = train.next_token_loss, [], []

    def spiking(model: GPT, inputs: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        calls.append(model.training)
        second_half_of_step_52 = model.training and sum(calls) == 106
        seen.extend([inputs] * second_half_of_step_52)
        return loss(model, inputs, *rest, **options) * (9 if second_half_of_step_52 else 1)

    monkeypatch.setattr(train, "next_token_loss", spiking)
    out, options = tmp_path / "run", {"train__max_steps": 60, "train__log_every": 2, "train__checkpoint_every": 53}
    result = run(train, *tiny_run(corpus_file, out, **options, train__eval_every=100))
    assert "loss spike: " in result.out and "in step 52, lately" in result.out
    assert list(metrics(out, "loss_spike")) == [53]
    windows = metrics(out, "windows")[53]
    tokens = next((tmp_path / "prepared").glob("*/train.bin")).read_bytes()[::2]
    assert seen[0].tolist() == [[tokens[(start + i) % len(tokens)] for i in range(11)] for start in windows[1]]

    spikes = metrics(out, "loss_spike")  # it was in no line yet when the checkpoint of step 53 was written
    shutil.rmtree(out / "checkpoints" / "step-00000060")
    assert run(train, "--resume", out).exit_code == 0
    assert metrics(out, "loss_spike") == spikes


def test_numbers_that_json_cannot_say_are_null(run, corpus_file, tmp_path, monkeypatch) -> None:
    scaler = torch.amp.GradScaler
    huge = lambda device, enabled: scaler(device, enabled=enabled, init_scale=2.0**40)  # noqa: E731
    monkeypatch.setattr(torch.amp, "GradScaler", huge)
    assert run(train, *tiny_run(corpus_file, tmp_path / "run", train__dtype="float16")).exit_code == 0
    assert None in metrics(tmp_path / "run", "grad_norm").values()
    assert "Infinity" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_only_the_newest_and_the_best_checkpoints_are_kept(run, corpus_file: Path, tmp_path: Path) -> None:
    changes = {"train__keep_checkpoints": 2, "train__checkpoint_every": 2, "train__learning_rate": 3.0}
    run(train, *tiny_run(corpus_file, tmp_path / "run", **changes, train__eval_every=2, train__warmup_steps=6))
    val_loss = metrics(tmp_path / "run", "val_loss")
    best = min((step for step in val_loss if step), key=val_loss.get)
    kept = {int(path.name[-8:]) for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {10, 12, best} and best < 10


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


def test_an_output_that_cannot_be_written_is_one_sentence(run, corpus_file: Path) -> None:
    result = run(train, *tiny_run(corpus_file, corpus_file / "run"))
    assert result.exit_code == 2 and "is not a directory one may write to" in result.err


def test_learning_rates() -> None:
    cosine = TrainConfig(learning_rate=1.0, warmup_steps=10, max_steps=110, final_lr_fraction=0.1)
    rates = [learning_rate_at(step, cosine) for step in range(111)]
    assert rates[:2] == [0.1, 0.2] and rates[9] == rates[10] == 1.0
    assert rates[60] == pytest.approx(0.55) and rates[110] == pytest.approx(0.1)
    wsd = TrainConfig(
        learning_rate=1.0, warmup_steps=10, max_steps=100, schedule="wsd", decay_fraction=0.4, final_lr_fraction=0.0
    )
    rates = [learning_rate_at(step, wsd) for step in range(101)]
    assert rates[10:61] == [1.0] * 51
    assert rates[80] == pytest.approx(0.5) and rates[100] == 0.0
    assert learning_rate_at(150, wsd) == 0.0 and learning_rate_at(300, cosine) == pytest.approx(0.1)  # and stays there


def test_only_matrices_decay() -> None:
    model = make_gpt()
    decayed, rest = make_optimizer(model, TrainConfig(beta2=0.97)).param_groups
    assert decayed["betas"] == rest["betas"] == (0.9, 0.97)
    assert all(p.dim() == 2 for p in decayed["params"]) and decayed["weight_decay"] == 0.1
    assert all(p.dim() == 1 for p in rest["params"]) and rest["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_speed_counts_training_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("training.progress.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("training.device.peak_flops", lambda device: 1e9)
    model, state, cpu = make_gpt(), {"step": 0, "train_seconds": 5.0}, torch.device("cpu")
    peak = peak_tokens_per_second(model, cpu)
    with Progress(state, 10, tokens_per_step=7, peak_tokens_per_second=peak, device=cpu) as progress:
        for _ in range(4):
            now[0] += 2.0
            progress.step()
        with progress.paused("evaluating"):
            now[0] += 50.0
        speed = progress.speed(loss=1.0)
    assert state == {"step": 4, "train_seconds": 13.0}
    num_parameters = sum(p.numel() for p in model.parameters()) - 11 * 15
    flops = 6 * num_parameters + 12 * 2 * 15 * 11
    assert speed == {"tokens": 28, "tokens_per_second": 3.5, "mfu": pytest.approx(3.5 * flops / 1e9)}


@pytest.mark.parametrize("changes", [{}, {"train__optimizer": "muon"}, {"train__dtype": "float16"}], ids=str)
def test_a_rehearsal_leaves_no_trace(run, corpus_file: Path, tmp_path: Path, monkeypatch, changes: dict) -> None:
    for out, rehearsal in (("rehearsed", train.rehearse), ("not", lambda *arguments: (0.0, 0.0))):
        monkeypatch.setattr(train, "rehearse", rehearsal)
        assert run(train, *tiny_run(corpus_file, tmp_path / out, **changes, train__max_steps=4)).exit_code == 0
        assert run(train, "--resume", tmp_path / out, "--train.max_steps", 6).exit_code == 0
    checkpoints = [tmp_path / out / "checkpoints" / "step-00000006" for out in ("rehearsed", "not")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        rehearsed, not_rehearsed = (load_tensors(checkpoint / file) for checkpoint in checkpoints)
        assert rehearsed.keys() == not_rehearsed.keys()
        assert all(torch.equal(rehearsed[name], not_rehearsed[name]) for name in rehearsed)
    assert metrics(tmp_path / "rehearsed", "train_loss") == metrics(tmp_path / "not", "train_loss")


def test_a_rehearsal_times_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, now, asked = make_gpt(), [100.0], []
    monkeypatch.setattr("training.progress.time.perf_counter", lambda: now[0])
    step = torch.optim.AdamW.step

    def slow_step(optimizer: torch.optim.Optimizer) -> None:
        now[0] += 0.5
        step(optimizer)

    def backward(micro_batch: int) -> None:
        now[0] += 2.0
        asked.append(micro_batch)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)

    monkeypatch.setattr(torch.optim.AdamW, "step", slow_step)
    before = [parameter.clone() for parameter in model.parameters()]
    assert rehearse(model, TrainConfig(), backward, lambda model: (3, 5, 7)) == (6.0, 0.5)
    assert asked == [3, 3, 5, 7]
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "step, evaluated, more, said",
    [
        (0, None, {}, "about 3 min for 29 steps, and 28 s for 6 validation losses"),  # at 0, 7, 14, 21, 28, 29
        (14, 14, {}, "about 2 min for 15 steps, and 14 s for 3 validation losses"),
        (14, 7, {"activation_checkpointing": True}, "about 2 min for 15 steps, and 14 s for 4 validation losses"),
        (16, 14, {}, "about 84 s for 13 steps, and 14 s for 3 validation losses"),
    ],
)
def test_the_time_that_a_run_will_take(step: int, evaluated: int | None, more: dict, said: str) -> None:
    config = TrainConfig(max_steps=29, eval_every=7, grad_accum_steps=3, **more)
    assert time_line(config, step, evaluated, gradients=6.0, update=0.5, eval_batches=7.0) == said


@pytest.mark.parametrize(
    "seconds, words", [(0.4, "0 s"), (89, "89 s"), (95, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (3e5, "3.5 days")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


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


def test_a_signal_in_a_sample_leaves_it_and_the_evaluation_to_the_next_session(
    run, uncertified, straight: Path, corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, stream, made = tmp_path / "run", train.stream, []

    def interrupted(*arguments: object, **options: object) -> Iterator[torch.Tensor]:
        for number, token in enumerate(stream(*arguments, **options)):
            made.append(number)
            if len(made) == 7 + 5:  # the fifth token of the sample at step 4
                os.kill(os.getpid(), signal.SIGTERM)
            yield token

    with monkeypatch.context() as patch:
        patch.setattr(train, "stream", interrupted)
        result = run(train, *tiny_run(corpus_file, out))
    assert result.exit_code == 75 and "saved step 4;" in result.err
    assert len(made) == 7 + 5 and list(metrics(out, "sample")) == list(metrics(out, "val_loss")) == [0]
    assert run(train, "--resume", out).exit_code == 0
    assert same_bits(weights(straight), weights(out))
    for key in ("sample", "val_loss", "train_loss"):
        assert metrics(straight, key) == metrics(out, key)


def test_a_second_signal_stops_at_once_but_not_a_double_one(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    now, raised = [10.0], []
    monkeypatch.setattr("training.progress.time.monotonic", lambda: now[0])
    monkeypatch.setattr("training.progress.signal.raise_signal", raised.append)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        state = {"step": 5}
        interrupt = Interrupt(state)
        state["step"] = 6
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert not interrupt
        interrupt.receive(signal.SIGTERM, None)
        now[0] += 0.01
        interrupt.receive(signal.SIGTERM, None)
        assert interrupt and not raised
        now[0] += 5
        interrupt.receive(signal.SIGTERM, None)
        assert raised == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_bug_of_ours_keeps_its_traceback() -> None:
    def main() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_script(main)
