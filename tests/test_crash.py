"""A run that is stopped at any instant ends, once resumed, in the same bits; and what was said to be saved is there."""

import errno
import hashlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

import data.prepare
import data.tokenise
import model.checkpoint
import training.run
from data.prepare import DataConfig
from model import GPT, ModelError, disk
from model.checkpoint import keep_newest, save_checkpoint
from tests.conftest import make_gpt, often, save_gpt, tiny_run
from tests.crash import KILLED, Disk, Effects, Recorder, Runs, die_at, in_child, put

FINAL = "step-00000012"


def final_hash(out: Path) -> str:
    return hashlib.sha256((out / "checkpoints" / FINAL / "model.safetensors").read_bytes()).hexdigest()


class Setting:
    """Runs with dropout, accumulation, evaluation and checkpoints, and how the one without a break ended."""

    def __init__(self, directory: Path):
        corpus = directory / "corpus.txt"
        corpus.write_text(" ".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}.\n" for i in range(100)))
        options = {"train__keep_checkpoints": 1, "train__checkpoint_every": 3}
        self.runs = Runs(lambda out: tiny_run(corpus, out, **options), directory / "log")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        self.runs.here(directory / "straight")
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self.expected = final_hash(directory / "straight")
        began = time.perf_counter()
        self.runs(directory / "timed")
        self.seconds = time.perf_counter() - began

    def finish(self, out: Path, saved: int) -> list[str]:
        """Resume to the end; which of the three promises were broken."""
        broken = []
        finished = (out / "checkpoints" / FINAL).is_dir()  # then there is nothing to resume
        if (exit_code := self.runs(out)) != 0:
            return [f"the resume crashed with {exit_code}: {self.runs.said.read_text()[-1000:]}"]
        resumed = next((step for word, step in self.runs.noted() if word == "resumed"), saved if finished else 0)
        if resumed < saved:
            broken.append(f"step {saved} was saved, and the run resumed from {resumed}")
        if final_hash(out) != self.expected:
            broken.append("the final weights differ")
        leftovers = [path.name for path in out.rglob("*") if path.name.endswith(".tmp")]
        return broken + [f"{leftovers} left behind"] * bool(leftovers)

    def last_saved(self) -> int:
        return max((step for word, step in self.runs.noted() if word == "saved"), default=0)

    def die_everywhere(self, tmp_path: Path, every: int, first: int = 0) -> tuple[int, list]:
        """Die at each effect on the disk, `every` apart, and resume: the number of places, and the promises broken."""
        places, broken = 0, []
        for number in range(first, 10_000, every):
            out = tmp_path / f"effect{number}"
            self.runs.noted()
            if self.runs(out, before=die_at(number)) != KILLED:
                return places, broken
            places += 1
            broken += [(number, promise) for promise in self.finish(out, self.last_saved())]
            shutil.rmtree(out)

    def kill_at_random(self, tmp_path: Path, kills: int, seed: int) -> list:
        """Kill -9 a run at a random instant, resume it, kill that and so on until one ends; as often as asked."""
        choose, broken, killed = random.Random(seed), [], 0
        for number in count():
            out, saved, exit_code = tmp_path / f"run{number}", 0, KILLED
            self.runs.noted()
            while exit_code == KILLED and killed < kills:
                exit_code = self.runs(out, after=choose.uniform(0, self.seconds))
                killed += exit_code == KILLED
                saved = max(saved, self.last_saved())
            broken += [(number, promise) for promise in self.finish(out, saved)]
            shutil.rmtree(out)
            if killed == kills:
                return broken


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    directory = tmp_path_factory.mktemp("crash")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.prepare, "PREPARED", directory / "prepared")
        yield Setting(directory)


def test_dying_at_effects_on_the_disk(setting: Setting, tmp_path: Path) -> None:
    places, broken = setting.die_everywhere(tmp_path, every=29, first=random.Random(0).randrange(29))
    assert broken == [] and places >= 6


@pytest.mark.long
def test_dying_at_every_effect_on_the_disk(setting: Setting, tmp_path: Path, figure: Callable) -> None:
    places, broken = setting.die_everywhere(tmp_path, every=1)
    assert broken == [] and places >= 150
    figure(f"{places} effects on the disk, death at each: all resumed to the same bits, no saved step lost")


def test_kill_9_at_random_instants(setting: Setting, tmp_path: Path) -> None:
    assert setting.kill_at_random(tmp_path, kills=10, seed=0) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_kill_9_at_a_thousand_random_instants(setting: Setting, tmp_path: Path, seed: int, figure: Callable) -> None:
    assert setting.kill_at_random(tmp_path, kills=200, seed=seed) == []
    figure("200 of 1,000 kill -9 at random instants: all resumed to the same bits, no saved step lost")


@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.long)])
def test_sigterm_at_random_instants(setting: Setting, tmp_path: Path, times: int, figure: Callable) -> None:
    choose, exit_codes = random.Random(2), []
    for number in range(9 * times):
        if number >= times and exit_codes.count(75) > times / 8:  # enough of them met a run
            break
        out = tmp_path / f"run{number}"
        setting.runs.noted()
        exit_codes.append(setting.runs(out, after=choose.uniform(0, setting.seconds), number=signal.SIGTERM))
        assert exit_codes[-1] in (0, 75, KILLED)  # killed: before the program had a handler
        assert setting.finish(out, setting.last_saved()) == []
        shutil.rmtree(out)
    assert exit_codes.count(75) > times / 8
    figure(
        f"{len(exit_codes)} SIGTERM at random instants: {exit_codes.count(75)} exits with 75, "
        "all resumed to the same bits"
    )


@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.long)])
def test_kill_9_while_data_is_prepared(tmp_path: Path, kills: int, figure: Callable, monkeypatch) -> None:
    monkeypatch.setattr(data.sources, "PIECE", 4096)
    monkeypatch.setattr(data.tokenise, "GROUP", 4096)
    (tmp_path / "corpus.txt").write_text("".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}.\n" for i in range(20_000)))
    config, choose = DataConfig(str(tmp_path / "corpus.txt"), "bpe:300"), random.Random(0)

    def content(directory: Path) -> dict[str, bytes]:
        corpus = data.prepare.prepare(config, directory)
        files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "meta.json"}
        return files | {"fingerprint": corpus.meta["fingerprint"].encode()}

    content(tmp_path / "first")  # what is imported at first use is there then
    began = time.perf_counter()
    expected = content(tmp_path / "straight")
    seconds, killed, directory = time.perf_counter() - began, 0, tmp_path / "killed"
    while killed < kills:
        shutil.rmtree(directory, ignore_errors=True)
        in_child(partial(content, directory), choose.uniform(0, seconds))
        killed += (tmp_path / "killed.tmp").exists()
        assert content(directory) == expected
    names = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock")
    assert names == ["corpus.txt", "first", "killed", "straight"]
    figure(f"{killed} kill -9 while data was prepared: all ended in the same bytes")


# What the three promises are worth: with a mistake in saving or resuming, one of them is broken.

RESTORE, SAVE = training.run.Run.restore, save_checkpoint


def without_optimizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(training.run, "load_optimizer_tensors", lambda *rest: None)


def one_step_too_many(patch: pytest.MonkeyPatch) -> None:
    def restore(run: training.run.Run, *rest: object) -> None:
        RESTORE(run, *rest)
        run.state["step"] += run.resumed_from is not None

    patch.setattr(training.run.Run, "restore", restore)


def purge_before_saving(patch: pytest.MonkeyPatch) -> None:
    def save(parent: Path, *rest: object) -> Path:
        for directory in model.checkpoint.step_directories(parent):
            disk.remove(directory)
        return SAVE(parent, *rest)

    patch.setattr(training.run, "save_checkpoint", save)


def in_place_and_trusted(patch: pytest.MonkeyPatch) -> None:
    """Under its last name from the beginning, and nobody compares it with the manifest."""

    def save(parent: Path, step: int, *rest: object) -> Path:
        directory = parent / f"step-{step:08d}"
        rename, make_directory, write = disk.rename, disk.make_directory, disk.write
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(disk, "make_directory", lambda path: make_directory(directory))
            inner.setattr(disk, "write", lambda path, content: write(directory / path.name, content))
            inner.setattr(disk, "sync", lambda path: None)
            inner.setattr(disk, "remove", lambda path: None)
            inner.setattr(disk, "rename", lambda path, target: rename(directory, directory))
            return SAVE(parent, step, *rest)

    patch.setattr(training.run, "save_checkpoint", save)
    patch.setattr(model.checkpoint, "verify", lambda directory: None)


@pytest.mark.parametrize(
    "mistake, promise",
    often(
        (purge_before_saving, "was saved, and the run resumed from"),
        (without_optimizer, "the final weights differ"),
        (one_step_too_many, "the final weights differ"),
        (in_place_and_trusted, "the resume crashed"),
    ),
)
def test_a_mistake_in_saving_breaks_a_promise(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: Callable, promise: str
) -> None:
    mistake(monkeypatch)
    _, broken = setting.die_everywhere(tmp_path, every=47, first=5)
    assert any(promise in text for _, text in broken), broken


def save_three(parent: Path) -> Iterator[int]:
    """Save three checkpoints and keep one, as a run does; yields each step when it is said to be saved."""
    torch.manual_seed(0)
    disk.make_directories(parent)
    for step in (1, 2, 3):
        save_gpt(parent, step, make_gpt(), {"tokenizer.json": b"{}"}, optimizer={"a.step": torch.ones(1)})
        yield step
        keep_newest(parent, step, 1, None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_a_disk_that_fails_costs_no_older_checkpoint(tmp_path: Path, monkeypatch, number: int) -> None:
    for effect in range(100):
        parent = tmp_path / str(effect)
        parent.mkdir()
        steps, number_of = save_three(parent), count()
        assert next(steps) == 1

        def fail(name: str, arguments: tuple, effect: int = effect, number_of: Iterator[int] = number_of) -> None:
            if next(number_of) == effect:
                raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(disk, "os", Effects(fail))
            try:
                next(steps)
                break
            except OSError as error:
                assert error.errno == number
        assert [path.name for path in parent.iterdir() if path.name != "step-00000002"] == ["step-00000001"]
        assert find_checkpoint_in(parent) >= 1
    assert effect > 20


def find_checkpoint_in(parent: Path) -> int:
    """The step of the newest intact checkpoint in a directory of checkpoints, 0 if there is none."""
    for directory in model.checkpoint.step_directories(parent):
        try:
            model.checkpoint.verify(directory)
        except ModelError:
            continue
        GPT.from_pretrained(directory)  # what is intact can be loaded
        return int(directory.name.removeprefix("step-"))
    return 0


def lost_after_power_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: int, seed: int) -> tuple[int, int]:
    """Cut the power at random after each effect of three saves: how often, and how often a saved step was lost."""
    choose, recorder, top = random.Random(seed), Recorder(), tmp_path / "disk"
    top.mkdir()
    saved_at = {0: 0}
    with monkeypatch.context() as patch:
        patch.setattr(disk, "os", recorder)
        for step in save_three(top / "out" / "run" / "checkpoints"):
            saved_at[len(recorder.log)] = step
    number = lost = 0
    for length in range(len(recorder.log) + 1):
        saved = max(step for at, step in saved_at.items() if at <= length)
        after = Disk(top)
        for effect in recorder.log[:length]:
            after.apply(*effect)
        for _ in range(states):
            real = tmp_path / "after"
            put(after.root.after(choose), real)
            number += 1
            lost += find_checkpoint_in(real / "out" / "run" / "checkpoints") < saved
            shutil.rmtree(real)
    return number, lost


@pytest.mark.parametrize("states", [3, pytest.param(14, marks=pytest.mark.long)])
def test_a_power_cut_loses_nothing_that_was_saved(tmp_path: Path, monkeypatch, states: int, figure: Callable) -> None:
    number, lost = lost_after_power_cuts(tmp_path, monkeypatch, states, seed=0)
    assert number > 70 * states and lost == 0
    figure(f"{number} states of the disk after a power cut: no saved step lost, nothing damaged loaded")


@pytest.mark.parametrize("sync", ["files", "names"])
def test_a_power_cut_shows_a_missing_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str) -> None:
    class Forgetful(Recorder):
        def fsync(self, descriptor: int) -> None:
            if self.paths[descriptor].is_dir() != (sync == "names"):
                super().fsync(descriptor)

    monkeypatch.setitem(globals(), "Recorder", Forgetful)
    assert lost_after_power_cuts(tmp_path, monkeypatch, states=3, seed=0)[1] > 0
