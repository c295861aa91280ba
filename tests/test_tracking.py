"""wandb: a real offline run says what metrics.jsonl says, and no failure of wandb is one of the training."""

import base64
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import wandb
from google.protobuf.message import DecodeError
from wandb.proto.wandb_internal_pb2 import ArtifactRecord, Record

import train
from model import GPT
from tests.conftest import metrics, tiny_run
from training.config import TrainConfig
from training.tracking import Tracker

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def clean_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End what wandb leaves running in a process that goes on after the training."""
    for name in ("exit", "excepthook"):  # which wandb replaces
        monkeypatch.setattr(sys, name, getattr(sys, name))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_DATA_DIR", "")
    monkeypatch.delenv("WANDB_DATA_DIR")  # train.py sets it: so it is unset again after the test
    yield
    wandb.teardown(1)


def records(file: Path) -> Iterator[Record]:
    """What is in a .wandb file: protocol buffers in the log format of LevelDB, after a header of 7 bytes."""
    content, at, record = file.read_bytes(), 7, b""
    while at < len(content):
        room = 2**15 - at % 2**15
        if room < 7:  # too little for the next chunk's header
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or the last of it
            yield Record.FromString(record)
            record = b""


class Session:
    """One session of a run, read back."""

    def __init__(self, directory: Path):
        (file,) = directory.glob("*.wandb")
        self.records = list(records(file))
        self.files = directory / "files"
        (self.run,) = (record.run for record in self.records if record.HasField("run"))
        self.config = {item.key: json.loads(item.value_json) for item in self.run.config.update if item.key != "_wandb"}
        rows = [record.history.item for record in self.records if record.HasField("history")]
        rows = [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in rows]
        rows = [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]
        self.lines = [row for row in rows if "sample._type" not in row]
        self.samples = [row for row in rows if "sample._type" in row]
        self.exit_codes = [record.exit.exit_code for record in self.records if record.HasField("exit")]

    def models(self) -> list[ArtifactRecord]:
        artifacts = [record.artifact for record in self.records if record.HasField("artifact")]
        return [artifact for artifact in artifacts if artifact.type == "model"]


def sessions(
    out: Path, complete: Callable[[Session], bool] = lambda session: bool(session.exit_codes)
) -> list[Session]:
    """The sessions of a run, in their order, once a process of wandb has written them to the end."""
    directories, waited = sorted((out / "wandb").glob("offline-run-*")), 0.0
    while True:
        try:
            found = [Session(directory) for directory in directories]
            if all(map(complete, found)) or waited > 10:
                return found
        except (ValueError, struct.error, DecodeError):  # not all of it is there
            assert waited < 10, directories
        time.sleep(0.1)
        waited += 0.1


def logged(out: Path) -> list[dict]:
    """The lines of metrics.jsonl as wandb has them: metrics of heads by name; samples are tables there."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "sample" not in line]
    for line in lines:
        for metric, layers in line.pop("heads", {}).items():
            line |= {f"{metric}/{i}.{j}": value for i, row in enumerate(layers) for j, value in enumerate(row)}
    return lines


def in_the_next_second() -> None:
    """wandb names a session by the second it began in."""
    time.sleep(1.01 - time.time() % 1)


def test_an_offline_run_says_what_metrics_jsonl_says(run, corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "some run"
    changes = {"train__wandb": "offline", "train__wandb_group": "mine", "train__sample_prompt": "7 is"}
    result = run(train, *tiny_run(corpus_file, out, **changes))
    assert result.exit_code == 0 and "wandb is off" not in result.out
    (session,) = sessions(out)
    assert session.lines == logged(out)
    (metric,) = (record.metric for record in session.records if record.HasField("metric"))
    assert (metric.glob_name, metric.step_metric) == ("*", "step")

    tables = tomllib.loads((out / "config.toml").read_text())
    config = {name: {key: v for key, v in table.items() if v is not None} for name, table in session.config.items()}
    assert config == tables  # in TOML what is None is left out
    trainer = json.loads((out / "checkpoints" / "step-00000012" / "trainer.json").read_text())
    assert (session.run.run_id, session.run.run_group) == (trainer["wandb_id"], "mine")
    assert (session.run.project, session.run.display_name) == ("tril", "some run")
    assert session.exit_codes == [0] and not session.models()

    tables = [json.loads((session.files / row["sample.path"]).read_text()) for row in session.samples]
    assert all(table["columns"] == ["step", "prompt", "text"] for table in tables)
    rows = [row for table in tables for row in table["data"]]
    assert [row["step"] for row in session.samples] == [row[0] for row in rows] == [0, 4, 8, 12, 12]
    assert {prompt for _, prompt, _ in rows} == {"7 is"}
    assert {step: text for step, _, text in rows[:-1]} == metrics(out, "sample")
    text = rows[-1][-1]  # the last is longer
    assert text.startswith(rows[-2][-1]) and len(text) > 20 and text.splitlines()[0][:20] in result.out


def test_nothing_leaves_the_run_directory_and_no_name_gets_in(run, corpus_file, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    assert run(train, *tiny_run(corpus_file, tmp_path / "run", train__wandb="offline")).exit_code == 0
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.parent.name != "logs"]
    (session,) = sessions(tmp_path / "run")
    assert not session.run.host and not session.run.HasField("git")
    assert not any(record.HasField("environment") or record.HasField("stats") for record in session.records)
    said = b"".join(record.SerializeToString() for record in session.records)
    assert sys.executable.encode() not in said and b"train.py" not in said
    sent = {row["sample.path"] for row in session.samples}
    assert {str(path.relative_to(session.files)) for path in session.files.rglob("*") if path.is_file()} == sent


def test_a_checkpoint_is_an_artifact_if_that_is_asked_for(run, corpus_file: Path, tmp_path: Path) -> None:
    out, wanted = tmp_path / "run", {"train__wandb": "offline", "train__wandb_checkpoints": "true"}
    worse = {"train__learning_rate": 3.0, "train__warmup_steps": 9}  # so that the last checkpoint is not the best
    assert run(train, *tiny_run(corpus_file, out, **wanted, **worse)).exit_code == 0
    (session,) = sessions(out)
    best = json.loads((out / "checkpoints" / "step-00000012" / "trainer.json").read_text())["best_step"]
    assert best < 12
    names = [f"step-{step:08d}" for step in (best, 12)]
    models = session.models()
    assert [sorted({*model.aliases} - {"latest"}) for model in models] == [["best", names[0]], [names[1]]]
    assert {model.name for model in models} == {f"model-{session.run.run_id}"}
    for model, name in zip(models, names, strict=True):
        files = {path.name: path.read_bytes() for path in (out / "checkpoints" / name).iterdir()}
        listed = {entry.path: entry for entry in model.manifest.contents}
        assert listed.keys() == files.keys()
        for path, content in files.items():
            assert listed[path].size == len(content)
            assert listed[path].digest == base64.b64encode(hashlib.md5(content).digest()).decode()
            assert Path(listed[path].local_path) == out / "checkpoints" / name / path


def test_an_interrupted_run_goes_on_under_its_id(run, corpus_file: Path, tmp_path: Path, monkeypatch) -> None:
    out, loss, calls = tmp_path / "run", train.next_token_loss, []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever started the tests may have asked to ignore it

    def interrupting(model: GPT, *arguments: object, **options: object) -> torch.Tensor:
        calls.append(model.training)
        if sum(calls) == 13 and model.training:
            os.kill(os.getpid(), signal.SIGTERM)  # in the middle of step 6
        return loss(model, *arguments, **options)

    wanted = {"train__wandb": "offline", "train__wandb_checkpoints": "true"}
    with monkeypatch.context() as patch:
        patch.setattr(train, "next_token_loss", interrupting)
        patch.setattr(train, "certify", lambda *arguments: {"causal": "not asked"})
        patch.setattr(train, "memory_line", lambda *arguments: "")
        patch.setattr(train, "rehearse", lambda *arguments: (0.0, 0.0))
        assert run(train, *tiny_run(corpus_file, out, **wanted)).exit_code == 75
    (first,) = sessions(out)
    assert first.exit_codes == [75] and [row["step"] for row in first.samples] == [0, 4] and not first.models()
    in_the_next_second()
    assert run(train, "--resume", out, "--train.wandb_group", "later").exit_code == 0
    first, second = sessions(out)
    assert first.run.run_id == second.run.run_id and second.run.run_group == "later"
    assert first.lines + second.lines == logged(out)
    assert second.exit_codes == [0] and [row["step"] for row in second.samples] == [8, 12, 12]
    assert len(second.models()) == 1


@pytest.mark.long
def test_an_error_ends_it_in_wandb_too(corpus_file: Path, tmp_path: Path) -> None:
    program = (
        "import sys, data.prepare, train, configs;"
        "data.prepare.PREPARED = data.prepare.Path(sys.argv.pop(1)); configs.run_script(train.main)"
    )
    options = {"train__wandb": "offline", "train__learning_rate": 1e30}  # not finite in the next step
    arguments = [tmp_path / "prepared", *tiny_run(corpus_file, tmp_path / "run", **options)]
    process = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 3, process.stderr
    (session,) = sessions(tmp_path / "run")
    assert session.exit_codes == [3] and session.lines == logged(tmp_path / "run")
    assert [row["step"] for row in session.samples] == [0]


@pytest.mark.long
def test_what_a_crash_undid_is_not_sent_twice(run, corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    constant = {"train__schedule": "wsd", "train__decay_fraction": 0, "train__checkpoint_every": 100}
    run(train, *tiny_run(corpus_file, out, **constant, train__wandb="offline", train__max_steps=5))
    in_the_next_second()
    for steps in (9, 7):  # the second crashes before it has come to where the first was
        run(train, "--resume", out, "--train.max_steps", steps)
        shutil.rmtree(out / "checkpoints" / f"step-{steps:08d}")
        in_the_next_second()
    assert run(train, "--resume", out, "--train.max_steps", "12").exit_code == 0
    sent = [line for session in sessions(out) for line in session.lines]
    assert [line["step"] for line in sent if "train_loss" in line] == list(range(1, 13))
    assert {line["step"]: line["train_loss"] for line in sent if "train_loss" in line} == {
        line["step"]: line["train_loss"] for line in logged(out) if "train_loss" in line
    }


def test_a_spike_is_told_after_its_step(tmp_path: Path) -> None:
    state: dict = {"wandb_id": None}
    for steps in ([9, 10, 8], [8, 9, 10, 11]):  # 8 is the spike of an earlier step
        tracker = Tracker(TrainConfig(wandb="offline"))
        tracker.begin(tmp_path, state, {})
        for step in steps:
            tracker.log({"step": step, "loss_spike" if step == 8 else "train_loss": 1.5})
        tracker.finish(0)
        in_the_next_second()
    assert [[line["step"] for line in session.lines] for session in sessions(tmp_path)] == [[9, 10, 8], [11]]


def test_a_validation_that_was_broken_off_is_told_when_it_is_made(tmp_path: Path) -> None:
    state: dict = {"wandb_id": None}
    for kinds in (["train_loss"], ["train_loss", "val_loss"], ["val_loss"]):  # all of one step
        tracker = Tracker(TrainConfig(wandb="offline"))
        tracker.begin(tmp_path, state, {})
        for kind in kinds:
            tracker.log({"step": 8, kind: 1.5})
        tracker.finish(0)
        in_the_next_second()
    assert [[*session.lines] for session in sessions(tmp_path)] == [
        [{"step": 8, "train_loss": 1.5}],
        [{"step": 8, "val_loss": 1.5}],
        [],
    ]


@pytest.mark.long
def test_a_run_that_begins_again_is_another_one(run, corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for _ in range(2):
        shutil.rmtree(out / "checkpoints", ignore_errors=True)  # as if it had been killed before it had any
        assert run(train, *tiny_run(corpus_file, out, train__wandb="offline", train__max_steps=3)).exit_code == 0
        in_the_next_second()
    first, second = sessions(out)
    assert first.run.run_id != second.run.run_id
    assert second.lines == logged(out)


def test_wandb_that_dies_does_not_stop_the_training(run, corpus_file, tmp_path, monkeypatch) -> None:
    log = wandb.Run.log

    def dies(self: wandb.Run, record: dict) -> None:
        if record["step"] == 3:
            raise ConnectionError("gone\nand a hint")
        log(self, record)

    monkeypatch.setattr(wandb.Run, "log", dies)
    out = tmp_path / "run"
    result = run(train, *tiny_run(corpus_file, out, train__wandb="offline"))
    assert result.exit_code == 0 and len(logged(out)) == 16
    (line,) = (line for line in result.out.splitlines() if "wandb is off" in line)
    assert line == "wandb is off, metrics.jsonl has everything: ConnectionError: gone" and "hint" not in result.out
    wandb.teardown(0)
    (session,) = sessions(out, lambda session: len(session.lines) >= 3)
    assert session.lines == logged(out)[:3]


def test_without_a_network_it_waits_only_so_long(run, corpus_file, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("training.tracking.WAIT_SECONDS", 1)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    began = time.monotonic()
    result = run(train, *tiny_run(corpus_file, tmp_path / "run", train__wandb="online"))
    assert result.exit_code == 0 and result.out.count("wandb is off") == 1
    assert len(logged(tmp_path / "run")) == 16
    assert time.monotonic() - began < 10


def test_a_wandb_that_is_not_there_does_not_stop_the_training(run, corpus_file, tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        result = run(train, *tiny_run(corpus_file, tmp_path / "run", train__wandb="online"))
        assert result.exit_code == 0 and result.out.count("wandb is off") == 1
        result = run(train, *tiny_run(corpus_file, tmp_path / "other"))  # and is not missed where nobody asks for it
        assert result.exit_code == 0 and "wandb is off" not in result.out
