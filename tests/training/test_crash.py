"""A run that is stopped at any instant ends, once resumed, in the same bits; and what was said to be saved is there."""

import errno
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

import data.prepare
import files
import train
import training.run
from cli.script import run_script
from data.prepare import DataConfig
from model import GPT
from model.checkpoint import remove, save_checkpoint, step_directories
from tests.conftest import keeping_handlers, make_gpt, save_gpt, tiny_run
from tests.crash import KILLED, Before, die_at, in_child, watch
from training.options import read_config, to_toml
from training.run import RunDirectory

STEPS = 6
SHORT = {"max_steps": STEPS, "checkpoint_every": 2, "eval_every": 3, "keep_checkpoints": 1, "sample_tokens": 0}


class Setting:
    """Runs with dropout, accumulation, evaluation and checkpoints, and the weights of the one without a break.

    The last run has noted in a file which steps it has saved, and from which step it was resumed.
    """

    def __init__(self, directory: Path):
        corpus = directory / "corpus.txt"
        corpus.write_text(" ".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}.\n" for i in range(100)))
        options = {f"train__{name}": value for name, value in SHORT.items()}
        # Read once for all runs: reading takes as long as training.
        self.config = replace(read_config(tiny_run(corpus, directory / "unused", **options)), given=None)
        self.notes, self.said = directory / "notes", directory / "said"
        with keeping_handlers():
            self.train(directory / "straight")  # in this process: the others inherit what is imported at first use
        self.expected = self.final_tensors(directory / "straight")
        began = time.perf_counter()
        self.run(directory / "timed")
        self.seconds = time.perf_counter() - began

    def run(self, out: Path, before: Before | None = None, **kill: float) -> int:
        """Begin the run in `out`, or resume it, in a process of its own; return its exit code.

        before: see `watch`. kill: see `in_child`.
        """
        self.notes.unlink(missing_ok=True)
        return in_child(partial(self.train, out, before), said=self.said, **kill)

    def train(self, out: Path, before: Before | None = None) -> None:
        begun = any((out / "checkpoints").glob("step-*"))
        table = replace(self.config.train, out_dir=str(out))
        config = replace(self.config, train=table, resume=out if begun else None)
        assert not begun or (out / "config.toml").read_text() == to_toml(config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["train.py"])
            patch.setattr(train, "read_config", lambda argv: config)
            patch.setattr(train, "certify", lambda *_, **__: {"causal": "not asked"})  # takes time and changes nothing
            patch.setattr(train, "prove_loss", lambda *_, **__: {})
            patch.setattr(RunDirectory, "save", self.noting("saved", RunDirectory.save))
            patch.setattr(RunDirectory, "restore", self.noting("resumed", RunDirectory.restore))
            if before:
                watch(patch, out, before)
            run_script(train.main)

    def noting(self, word: str, method: Callable) -> Callable:
        """A method of a run that notes the step when it is done."""

        def noted(run: RunDirectory, *rest: object, **options: object) -> None:
            method(run, *rest, **options)
            self.note(word, run.step if word == "resumed" else rest[0].step)

        return noted

    def note(self, word: str, step: int) -> None:
        with open(self.notes, "a") as file:
            file.write(f"{word} {step}\n")

    def last(self, word: str) -> int | None:
        """The last step noted with this word."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return max((int(line.split()[1]) for line in lines if line.startswith(word)), default=None)

    def final_tensors(self, out: Path) -> list[bytes]:
        """The files of the weights, the optimizer, and all other state in tensors."""
        return [path.read_bytes() for path in sorted((out / "checkpoints" / f"step-{STEPS:08d}").glob("*.safetensors"))]

    def finish(self, out: Path, saved: int | None) -> list[str]:
        """Resume a run to its end; return which of the promises were broken. saved: the last step it has saved."""
        if (exit_code := self.run(out)) != 0:
            return [f"the resume crashed with {exit_code}: {self.said.read_text()[-1000:]}"]
        resumed, broken = self.last("resumed"), []
        if saved and resumed is not None and resumed < saved:  # a finished run is not resumed
            broken.append(f"step {saved} was saved, and the run resumed from {resumed}")
        if self.final_tensors(out) != self.expected:
            broken.append("the final tensors differ")
        leftovers = [path.name for path in out.rglob("*") if path.name.endswith(".tmp")]
        return broken + [f"{leftovers} left behind"] * bool(leftovers)

    def die_everywhere(self, tmp_path: Path, every: int) -> tuple[int, list]:
        """Die at each effect on the disk, `every` apart, and resume: the number of deaths, and the promises broken."""
        broken = []
        for deaths in count():
            out = tmp_path / str(deaths)
            if self.run(out, before=die_at(every * deaths)) != KILLED:
                return deaths, broken
            broken += [(every * deaths, promise) for promise in self.finish(out, self.last("saved"))]
            shutil.rmtree(out)

    def kill_at_random(self, tmp_path: Path, kills: int, seed: int) -> list:
        """Kill -9 a run at a random instant, resume it, kill that and so on until one ends; as often as asked."""
        choose, broken, killed = random.Random(seed), [], 0
        for number in count():
            out, saved, exit_code = tmp_path / f"run{number}", 0, KILLED
            while exit_code == KILLED and killed < kills:
                exit_code = self.run(out, after=choose.uniform(0, self.seconds))
                killed += exit_code == KILLED
                saved = self.last("saved") or saved
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


@pytest.mark.long
def test_dying_at_every_effect_on_the_disk(setting: Setting, tmp_path: Path, figure: Callable) -> None:
    deaths, broken = setting.die_everywhere(tmp_path, every=1)
    assert broken == [] and deaths >= 100
    figure(f"{deaths} effects on the disk, death at each: all resumed to the same bits, no saved step lost")


@pytest.mark.parametrize(
    "kills, seed", [(3, 0), *(pytest.param(80, seed, marks=pytest.mark.long) for seed in range(1, 6))]
)
def test_kill_9_at_random_instants(setting: Setting, tmp_path: Path, kills: int, seed: int, figure: Callable) -> None:
    assert setting.kill_at_random(tmp_path, kills, seed) == []
    figure(f"{kills} kill -9 at random instants: all resumed to the same bits, no saved step lost")


@pytest.mark.long
def test_kill_9_while_data_is_prepared(tmp_path: Path, figure: Callable) -> None:
    (tmp_path / "corpus.txt").write_text("".join(f"{i} is {'even' if i % 2 == 0 else 'odd'}.\n" for i in range(20_000)))
    config, choose, directory = DataConfig(str(tmp_path / "corpus.txt"), "bpe:300"), random.Random(0), tmp_path / "out"

    def content() -> dict[str, bytes]:
        corpus = data.prepare.prepare(config, directory)
        files = {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "meta.json"}
        return files | {"fingerprint": corpus.meta["fingerprint"].encode()}

    for _ in range(2):  # what is imported at first use is there the second time
        shutil.rmtree(directory, ignore_errors=True)
        began = time.perf_counter()
        expected = content()
    seconds, killed = time.perf_counter() - began, 0
    while killed < 50:
        shutil.rmtree(directory, ignore_errors=True)
        killed += in_child(content, choose.uniform(0, seconds)) == KILLED
        assert content() == expected
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == ["corpus.txt", "out"]
    figure(f"{killed} kill -9 while data was prepared: all ended in the same bytes")


# The tests of the tests: with a mistake in saving or resuming, a promise is broken.


def purge_before_saving(parent: Path, *rest: object, **options: object) -> None:
    for directory in step_directories(parent.parent):
        shutil.rmtree(directory)
    save_checkpoint(parent, *rest, **options)


@pytest.mark.long
@pytest.mark.parametrize(
    "name, mistake, promise",
    [
        ("save_checkpoint", purge_before_saving, "was saved, and the run resumed from"),
        ("load_optimizer_tensors", lambda *_, **__: None, "the final tensors differ"),
    ],
)
def test_a_mistake_in_saving_breaks_a_promise(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mistake: Callable, promise: str
) -> None:
    monkeypatch.setattr(training.run, name, mistake)
    _, broken = setting.die_everywhere(tmp_path, every=17)
    assert any(promise in text for _, text in broken), broken


# Disks that fail or forget, without processes: three checkpoints are saved, and one is kept.


def save_three(run: Path) -> Iterator[int]:
    """Save three checkpoints and keep the newest, as a run does; yield each step when it is said to be saved."""
    torch.manual_seed(0)
    files.make_directories(run / "checkpoints")
    for step in (1, 2, 3):
        save_gpt(run / "checkpoints", step, make_gpt(), {"tokenizer.json": b"{}"}, optimizer={"a.step": torch.ones(1)})
        yield step
        for directory in step_directories(run)[1:]:
            remove(directory, [path.name for path in directory.iterdir()])


def test_a_disk_that_fails_costs_no_older_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in count():
        run, number_of = tmp_path / str(number), count()
        run.mkdir()
        steps = save_three(run)
        assert next(steps) == 1

        def fail(name: str, arguments: tuple, number: int = number, number_of: Iterator[int] = number_of) -> None:
            if next(number_of) == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            watch(patch, run, fail)
            try:
                next(steps)
                break
            except OSError as error:
                assert error.errno == errno.EIO
        names = [path.name for path in (run / "checkpoints").iterdir() if path.name != "step-00000002"]
        assert names == ["step-00000001"]
        GPT.from_pretrained(run)  # one of the two is intact
    assert number > 20


def test_a_power_cut_loses_nothing_that_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may forget each content and each list of names that was not synced, until it is."""
    unsynced = set()

    def note(name: str, arguments: tuple) -> None:
        path = arguments[0]
        if name == "rename":  # what has its final name is believed to be whole
            assert not [each for each in unsynced if each == path or path in each.parents]
        if name in ("open", "write", "mkdir"):
            unsynced.add(path)
        else:
            unsynced.discard(path)  # it is synced, or has gone
        if name not in ("write", "fsync"):
            unsynced.add(path.parent)

    with monkeypatch.context() as patch:
        watch(patch, tmp_path, note)
        for _ in save_three(tmp_path / "out" / "run"):
            assert not unsynced
