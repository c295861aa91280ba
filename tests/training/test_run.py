"""A run directory: what a resumed run may change, whom it belongs to, and what is kept in it."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

import train
from errors import UserError
from files import lock
from tests.conftest import leave, metrics, same_bits, sign, tiny_run, weights
from training.config import MAY_CHANGE
from training.device import environment
from training.distributed import Ranks
from training.options import read_config, tables
from training.report import best_checkpoint, next_commands, read_metrics
from training.run import RunDirectory


@pytest.mark.parametrize("max_steps", [12, 7])
def test_a_finished_run_makes_no_step_and_says_what_to_do_next(run, straight: Path, max_steps: int) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in (straight / "checkpoints").rglob("*"))
    lines = (straight / "metrics.jsonl").read_bytes()
    (straight / "report.html").unlink()  # as if a kill had come before it
    result = run(train, "--resume", straight, "--train.max_steps", max_steps).ok()
    assert "A sample of what it writes:" in result.out and f"Next, with the model in {straight}" in result.out
    assert "--resume" not in result.out + (straight / "report.html").read_text()
    assert sorted((path, path.stat().st_mtime_ns) for path in (straight / "checkpoints").rglob("*")) == before
    assert (straight / "metrics.jsonl").read_bytes() == lines


def test_a_resumed_run_may_change_what_does_not_change_its_numbers(run, straight: Path, tmp_path: Path) -> None:
    shutil.copytree(straight, tmp_path / "other")
    for directory in ("step-00000008", "step-00000012"):
        shutil.rmtree(tmp_path / "other" / "checkpoints" / directory)
    looks = ["--train.eval_every", "5", "--train.log_every", "3", "--train.checkpoint_every", "7"]
    assert run(train, "--resume", tmp_path / "other", *looks, "--train.keep_checkpoints", "1").exit_code == 0
    assert same_bits(weights(straight), weights(tmp_path / "other"))
    assert list(metrics(tmp_path / "other", "val_loss")) == [0, 4, 5, 10, 12]


def test_a_checkpoint_that_does_not_say_its_tokens_has_those_of_its_steps(run, straight: Path) -> None:
    path = straight / "checkpoints" / "step-00000012" / "trainer.json"
    content = json.loads(path.read_text())
    assert content.pop("tokens") == 12 * 3 * 2 * 11
    path.write_text(json.dumps(content))
    sign(path.parent)
    assert run(train, "--resume", straight, "--train.max_steps", 13).exit_code == 0
    assert metrics(straight, "tokens")[13] == 13 * 3 * 2 * 11


def edit(directory: Path, *keys: str, value: object) -> None:
    """Change a value, under nested keys, in the state of a run's newest checkpoint."""
    path = directory / "checkpoints" / "step-00000012" / "trainer.json"
    content = entry = json.loads(path.read_text())
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = value
    path.write_text(json.dumps(content))
    sign(path.parent)


def test_no_other_option_may_change(straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.run.MAY_CHANGE", MAY_CHANGE | {"family"})  # which is of another table
    config, refused = read_config(["--resume", str(straight)]), set()
    for table, options in tables(config).items():
        for name, value in options.items():
            edit(straight, "config", table, name, value=-1)
            try:
                RunDirectory(config, Ranks()).refuse_changes()
            except UserError as error:
                assert (
                    str(error) == f"a resumed run cannot change --{table}.{name}: it began with -1, now {value!r:.60}"
                )
                refused.add((table, name))
            edit(straight, "config", table, name, value=value)
    every = {(table, name) for table, options in tables(config).items() for name in options}
    assert every - refused == {("train", name) for name in MAY_CHANGE}


def test_a_run_that_is_older_than_an_option_has_its_default(straight: Path) -> None:
    config = read_config(["--resume", str(straight)])
    options = tables(config)["train"]
    edit(straight, "config", "train", value={k: v for k, v in options.items() if k != "grad_clip"})
    RunDirectory(config, Ranks()).refuse_changes()
    edit(straight, "config", "train", value={k: v for k, v in options.items() if k != "beta2"})
    with pytest.raises(UserError, match="cannot change --train.beta2: it began with 0.95, now 0.99"):
        RunDirectory(config, Ranks()).refuse_changes()


def test_a_run_of_another_version_is_not_resumed(run, straight: Path) -> None:
    edit(straight, "batches", value=2)
    run(train, "--resume", straight, "--train.max_steps", 13).refused("step-00000012 is of another version of tril")


def test_a_resumed_run_says_in_what_it_differs_from_the_first_session(run, straight: Path, monkeypatch) -> None:
    result = run(train, "--resume", straight, "--train.max_steps", 13)
    differs = "\nnote: the numbers may differ from those of an unbroken run: "
    assert differs not in result.out
    monkeypatch.setattr(train, "environment", lambda *rest, **more: environment(*rest, **more) | {"threads": "64"})
    result = run(train, "--resume", straight, "--train.max_steps", 14)
    assert f"{differs}threads 1 -> 64\n" in result.out
    assert "\nnote: the run was to have 13 steps and has 14 now: the learning rate may jump\n" in result.out


def test_a_second_run_does_not_overwrite_the_first(run, straight: Path, corpus_file: Path) -> None:
    run(train, *tiny_run(corpus_file, straight)).refused(f"already holds a run: continue it with --resume {straight}")


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "report.html"])
def test_a_new_run_writes_over_nothing_of_others(run, corpus_file: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "exp"
    out.mkdir()
    (out / name).write_text("# mine\n[train]\nmax_steps = 1\n")
    (out / "log.txt").write_text("a name that no run has")
    command = tiny_run(corpus_file, out, train__max_steps=1)
    for words in [command, ["--resume", out]] if name == "config.toml" else [command]:
        run(train, *words).refused(f"{out} has {name}, which no run has written: give another --train.out_dir")
    assert (out / name).read_text().startswith("# mine") and len([*out.iterdir()]) == 2
    (out / name).rename(out / "mine")
    run(train, *command).ok()
    shutil.rmtree(out / "checkpoints")  # as if it had been killed before the first: the same command begins again
    run(train, *command).ok()


def test_the_folder_of_the_text_is_no_place_for_the_run(run, corpus_file: Path) -> None:
    """No run is read as a text, so it would hide its own."""
    folder = corpus_file.parent / "notes"
    folder.mkdir()
    corpus_file.rename(folder / "a.txt")
    run(train, *tiny_run(folder, folder / "../notes")).refused("notes has the text, which no run has written: give")
    assert [*folder.iterdir()] == [folder / "a.txt"]


def test_two_processes_cannot_share_a_run(run, straight: Path) -> None:
    again = ("--resume", straight, "--train.max_steps", 13)
    with lock(straight / ".lock", "free"):
        for more in ((), ("--model.n_layer", 3), ("--data.source", "nowhere")):  # asked before all else
            run(train, *again, *more).refused("is in use by another training process")
    run(train, *again).ok()


@pytest.mark.parametrize("place, exit_code", [("fcntl.flock", 2), ("os.fsync", 0)])
def test_of_a_file_system_that_lacks_something_only_locks_are_needed(
    run, straight: Path, monkeypatch, place: str, exit_code: int
) -> None:
    real = os.fsync

    def refuse(descriptor: int, how: int | None = None) -> None:
        if how is None and not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return real(descriptor)
        raise OSError(errno.EINVAL if how is None else errno.ENOLCK, "not here")

    monkeypatch.setattr(place, refuse)
    result = run(train, "--resume", straight, "--train.max_steps", 13)
    assert result.exit_code == exit_code
    assert not exit_code or f"{straight} is in use by another training process, or cannot be locked: " in result.err


def test_a_run_that_another_process_wrote_meanwhile_is_left_alone(run, corpus_file, tmp_path, monkeypatch) -> None:
    prepare = train.prepare

    def slow(*rest: object, **options: object) -> object:
        monkeypatch.setattr(train, "prepare", prepare)
        run(train, *tiny_run(corpus_file, tmp_path / "run", train__max_steps=4))
        return prepare(*rest, **options)

    monkeypatch.setattr(train, "prepare", slow)
    run(train, *tiny_run(corpus_file, tmp_path / "run")).refused("another training process has written to")
    assert list(metrics(tmp_path / "run", "train_loss")) == [1, 2, 3, 4]


@pytest.mark.parametrize("damage, left", [(b'{"step": 12, "tr\0\0\n{"step": 12}\n', 12), (None, 0)])
def test_damaged_metrics_do_not_end_a_run(run, straight: Path, damage: bytes | None, left: int) -> None:
    path = straight / "metrics.jsonl"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + damage)
    run(train, "--resume", straight, "--train.max_steps", "14", "--train.log_every", "100").ok()
    assert list(metrics(straight, "train_loss")) == [*range(1, left + 1), 14]


def test_numbers_that_json_cannot_say_are_null(run, corpus_file, tmp_path, monkeypatch) -> None:
    scaler = torch.amp.GradScaler
    huge = lambda device, enabled: scaler(device, enabled=enabled, init_scale=2.0**40)  # noqa: E731
    monkeypatch.setattr(torch.amp, "GradScaler", huge)
    assert run(train, *tiny_run(corpus_file, tmp_path / "run", train__dtype="float16")).exit_code == 0
    assert None in metrics(tmp_path / "run", "grad_norm").values()
    assert "Infinity" not in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_the_newest_the_best_and_damaged_later_checkpoints_are_kept(run, corpus_file: Path, tmp_path: Path) -> None:
    changes = {
        "train__keep_checkpoints": 2,
        "train__checkpoint_every": 2,
        "train__learning_rate": 3.0,
        "train__final_lr_fraction": 1.0,
    }
    run(train, *tiny_run(corpus_file, tmp_path / "run", **changes, train__eval_every=2, train__warmup_steps=6))
    val_loss = metrics(tmp_path / "run", "val_loss")
    best = min((step for step in val_loss if step), key=val_loss.get)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert {int(path.name[-8:]) for path in checkpoints.iterdir()} == {10, 12, best} and best < 10
    (checkpoints / "step-00000012" / "model.safetensors").unlink()
    again = ("--train.checkpoint_every", 11, "--train.max_steps", 11, "--train.keep_checkpoints", 1)
    assert run(train, "--resume", tmp_path / "run", *again).exit_code == 0
    assert {int(path.name[-8:]) for path in checkpoints.iterdir()} == {best, 11, 12}


def test_a_directory_with_a_file_of_somebody_is_not_deleted(run, straight: Path) -> None:
    for name in ("step-00000004", "step-00000008", "step-00000012"):
        (straight / "checkpoints" / name / "mine.gguf").write_text("mine")
    (straight / "checkpoints" / "step-00000012" / "model.safetensors").write_text("damaged")
    again = ("--train.keep_checkpoints", 1, "--train.checkpoint_every", 1)  # what is kept is met again, and said once
    result = run(train, "--resume", straight, *again)
    assert result.exit_code == 0 and "resumed from " in result.out and "step-00000008\n" in result.out
    assert result.out.count(" is kept, because of files that no run has written: 'mine.gguf'\n") == 3
    first, *kept = sorted(path.relative_to(straight).parts[1] for path in straight.rglob("mine.gguf"))
    assert first.startswith("damaged-step-00000012-") and kept == ["step-00000004", "step-00000008"]


@pytest.mark.parametrize(
    "losses, finished, num_heads, looked_at",
    [
        ({}, False, 6, None),
        ({8: 1.0, 12: 2.0}, False, 51, "'a run'"),  # stopped in the last evaluation
        ({4: 1.0, 12: 2.0}, True, 50, "'a run/checkpoints/step-00000004'"),  # it knows the text by heart
        ({0: 1.0, 3: 5.0, 5: 2.0, 7: None, 11: 2.0}, True, 6, "'a run/checkpoints/step-00000005'"),  # the first of two
    ],
)
def test_what_to_do_next(
    losses: dict, finished: bool, num_heads: int, looked_at: str | None, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    leave(Path("a run"), losses, filter(None, losses))
    commands = next_commands(
        Path("a run"),
        best_checkpoint(Path("a run"), read_metrics(Path("a run"))),
        finished,
        {"n_layer": 1, "n_head": num_heads},
    )
    looks = [f'python sample.py {looked_at} --prompt "..."']
    looks += [f"python inspect_attention.py {looked_at} --ablate zero"] * (num_heads <= 50)
    looks += [f"python inspect_attention.py {looked_at} -o 'a run'/heads.html"]
    assert commands == ["python train.py --resume 'a run'"] * (not finished) + looks * bool(looked_at)


@pytest.mark.parametrize(
    "lines, way",
    [
        ("compile = false\nrecord = true", "graph"),
        ("compile = true\nrecord = false", "true"),
        ("record = false", "auto"),
    ],
)
def test_an_older_run_is_compiled_or_recorded_as_it_was(straight: Path, tmp_path: Path, lines: str, way: str) -> None:
    config = (straight / "config.toml").read_text(encoding="utf-8")
    assert 'compile = "auto"' in config
    older = config.replace('compile = "auto"', lines)
    (tmp_path / "config.toml").write_text(older, encoding="utf-8")
    assert read_config(["--resume", str(tmp_path)]).train.compile == way
