"""Weights & Biases, for those who want it: every line of metrics.jsonl, and the samples."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WAIT_SECONDS = 15  # for wandb, at the start and at the end of a session; `wandb sync` sends later what is left then


class Tracker:
    """A run in wandb. The first failure prints one line and turns it off: training goes on, with its own exit code.

    Args:
        mode: that of `train.wandb`: disabled, offline or online.
        run_id: the id of the run in wandb, None for a new one.
        directory: that of the run.
        options: the configuration, by table.
    """

    run = None

    def __init__(self, mode: str, run_id: str | None, directory: Path, options: dict[str, dict]):
        self.run_id = run_id
        mode = os.environ.get("WANDB_MODE", mode) if mode != "disabled" else mode
        if mode == "disabled":
            return
        where = directory.absolute()
        os.environ.setdefault("WANDB_DATA_DIR", str(where / "wandb"))  # instead of the user's home
        with self.best_effort():
            import wandb  # slow to import, and optional

            # Nothing about the machine or the code is published: no host, user, paths, packages or uncommitted changes.
            settings = wandb.Settings(
                x_disable_machine_info=True,
                x_save_requirements=False,
                host="",
                program="train.py",
                init_timeout=WAIT_SECONDS,
                login_timeout=WAIT_SECONDS,
                finish_timeout=WAIT_SECONDS,
                console="off",
                silent=True,
            )
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "tril"),
                name=os.environ.get("WANDB_NAME", where.name),
                id=run_id,
                resume="allow",
                dir=os.environ.get("WANDB_DIR", where),
                mode=mode,
                config=options,
                settings=settings,
            )
            self.run.define_metric("*", step_metric="step")  # the x axis; wandb's own counts the lines of all sessions
            self.run_id = self.run.id
            print(f"wandb:  {self.run.url if mode == 'online' else self.run.sync_dir}")

    @contextmanager
    def best_effort(self) -> Iterator[None]:
        """Turn wandb off if something inside fails."""
        try:
            yield
        except Exception as error:
            self.run = None
            print(f"wandb is off, metrics.jsonl has everything: {error!r:.200}")

    def call(self, method: str, value: object) -> None:
        """Call a method of the run in wandb: log a line of metrics.jsonl, flat, or finish a session by its exit code.

        wandb itself notices a session that ends in an exception or a signal.
        """
        if self.run:
            with self.best_effort():
                getattr(self.run, method)(value)
