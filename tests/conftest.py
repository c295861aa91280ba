"""What the tests share: small models of odd sizes, a small corpus, and scripts run without a new process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

# Only pytest -m cuda sees a GPU, and what pretends one. The workers of pytest-xdist have the environment of the first
# process, not its words.
if not ("cuda" in sys.argv or "PYTEST_XDIST_WORKER" in os.environ or "benchmarks.pretended_gpu" in sys.modules):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Models this small gain nothing from two threads, and lose much where other work goes on: also in processes begun here.
os.environ["OMP_NUM_THREADS"] = "1"
# The threads with which PyTorch compiles do not live on in the forked ranks, which would wait for them for ever.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import pytest
import torch
from safetensors.torch import load_file

from model import GPT, GPTConfig
from model.checkpoint import save_checkpoint, sha256, to_json, with_own_hash
from model.huggingface import config_to_huggingface, tensors_to_huggingface
from training.progress import SIGNALS

# Where temporary files are in memory, waiting for the disk costs nothing; a killed process loses as much, or as little.
if "TMPDIR" not in os.environ and os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ["TMPDIR"], tempfile.tempdir = "/dev/shm", None  # which pytest has looked at already
# The first backward pass starts a thread for every GPU, and fake tensors let PyTorch believe in one: with such a thread
# nothing can be forked.
torch.ones((), requires_grad=True).backward()

ROOT = Path(__file__).parents[1]
TINY = {"n_layer": 2, "n_head": 3, "n_embd": 15, "context_length": 11, "dropout": 0.1}


@contextmanager
def keeping_handlers() -> Iterator[None]:
    """Give the signals that a run listens to their handlers back."""
    numbers = [number for number in signal.Signals if number.name in SIGNALS]
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    with keeping_handlers():
        yield


def make_gpt(**changes: object) -> GPT:
    """A tiny GPT whose weights are large enough to tell tokens apart."""
    model = GPT(GPTConfig(**{**TINY, "vocab_size": 17, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def save_gpt(parent: Path, step: int, gpt: GPT, files: dict[str, bytes], end: int = 256, **rest: dict) -> Path:
    """Save a checkpoint of a model as a run does. `rest` may have `optimizer`, `trainer` and `about`."""
    ids = {"bos_token_id": end, "eos_token_id": end}
    contents = {
        "config.json": to_json(config_to_huggingface(gpt.config) | ids),
        "model.safetensors": tensors_to_huggingface(gpt.config, gpt.state_dict()),
        "optimizer.safetensors": rest.get("optimizer", {}),
        "trainer.json": to_json({"step": step, **rest.get("trainer", {})}),
    }
    save_checkpoint(parent, step, contents | files, rest.get("about", {}))
    return parent / f"step-{step:08d}"


@pytest.fixture
def uncertified(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count the calls of the loss: the certificate does not call it."""
    monkeypatch.setattr("train.certify", lambda *_, **__: {"causal": "not asked"})
    monkeypatch.setattr("train.prove_loss", lambda *_, **__: {})


@pytest.fixture(autouse=True)
def prepared_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.prepare.PREPARED", tmp_path / "prepared")


def often(first: object, *others: object) -> list:
    """All of these for `parametrize` in `make test-long`, the first alone in `make test`."""
    several = [values if isinstance(values, tuple) else (values,) for values in others]
    return [first, *(pytest.param(*values, marks=pytest.mark.long) for values in several)]


def hold(true: bool, note: str) -> None:
    """Assert what is true of the tree as it is shipped. In a changed tree, where .ci/run does not ask, it is a note."""
    if not true and not os.environ.get("SHIPPED"):
        pytest.skip(f"in a changed tree: {note}")
    assert true, note


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """figure(text): what a test has counted, printed when all tests are done."""
    return partial(record_property, "figure")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = [text for report in terminalreporter.getreports("passed") for _, text in report.user_properties]
    reasons = Counter(report.longrepr[2] for report in terminalreporter.getreports("skipped"))
    skipped = [f"{number}: {reason.removeprefix('Skipped: ')}" for reason, number in reasons.items()]
    for title, lines in (("figures", figures), ("skipped", skipped)):
        if lines:
            terminalreporter.section(title)
            terminalreporter.write_line("\n".join(lines))


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Chromium, driven by playwright; tests that need it are skipped where it is not installed."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def run_python(*words: object, **options: object) -> subprocess.CompletedProcess:
    """Run Python with these arguments in the project, and keep what it prints. options: of `subprocess.run`."""
    usual = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.run([sys.executable, *words], **usual | options)


def write_corpus(directory: Path) -> Path:
    """A text of some structure: 4,000 bytes of counting."""
    path = directory / "corpus.txt"
    path.write_text(" ".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}.\n" for i in range(300))[:4000])
    return path


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    return write_corpus(tmp_path)


class Result(NamedTuple):
    """What a script printed and how it ended."""

    exit_code: int
    out: str
    err: str

    def ok(self) -> "Result":
        assert self.exit_code == 0, self.err
        return self

    def refused(self, message: str) -> "Result":
        assert self.exit_code == 2 and message in self.err, self.err
        return self


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Result]:
    """run(script, *arguments): what a script prints and how it exits, as under `python script.py`."""

    def run_script(script: ModuleType, *arguments: object) -> Result:
        from cli.script import run_script

        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
        code = 0
        try:
            run_script(script.main)
        except SystemExit as stop:
            code = stop.code or 0
        return Result(code, *capsys.readouterr())

    return run_script


def tiny_run(corpus: Path, out: Path, **changes: object) -> list[str]:
    """The arguments of a training run that takes a second."""
    options = {f"model.{name}": value for name, value in TINY.items()} | {
        "data.source": corpus,
        "data.tokenizer": "bytes",
        "train.out_dir": out,
        "train.device": "cpu",
        "train.dtype": "float32",
        "model.family": "gpt2",
        "train.optimizer": "adamw",
        "train.learning_rate": 4e-3,
        "train.decay_fraction": 0.4,
        "train.weight_decay": 0.1,
        "train.beta2": 0.99,
        "train.grad_clip": 1.0,
        "train.batch_size": 3,
        "train.grad_accum_steps": 2,
        "train.max_steps": 12,
        "train.warmup_steps": 2,
        "train.eval_every": 4,
        "train.checkpoint_every": 4,
        "train.keep_checkpoints": 9,
        "train.log_every": 1,
        "train.sample_tokens": 7,
    }
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def weights(run_directory: Path, step: int = 12, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run_directory / "checkpoints" / f"step-{step:08d}" / f"{name}.safetensors")


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def metrics(run_directory: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def leave(run_directory: Path, losses: dict[int, float | None], saved: Iterable[int]) -> None:
    """Leave the validation losses of a run by step, and its checkpoints, empty."""
    for step in saved:
        (run_directory / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    run_directory.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step, "val_loss": loss}) + "\n" for step, loss in losses.items()]
    (run_directory / "metrics.jsonl").write_text("".join(lines))


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of this session's, for what is made once."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def straight(run: Callable[..., Result], tmp_path: Path, kept: Path) -> Path:
    """A run of 12 steps without a break: trained once, and copied for each test."""
    import train

    if not (kept / "prepared").exists():
        run(train, *tiny_run(write_corpus(kept), kept / "straight")).ok()
        shutil.copytree(tmp_path / "prepared", kept / "prepared")
    shutil.copytree(kept / "prepared", tmp_path / "prepared", dirs_exist_ok=True)
    return shutil.copytree(kept / "straight", tmp_path / "straight")


def sign(checkpoint: Path) -> None:
    """Give a checkpoint the manifest of what is in it, as somebody would who wants it to be believed."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {
        path.name: {"size": path.stat().st_size, "sha256": sha256(path)}
        for path in checkpoint.iterdir()
        if path.name != "manifest.json"
    }
    manifest.pop("sha256")
    (checkpoint / "manifest.json").write_bytes(with_own_hash(manifest))
