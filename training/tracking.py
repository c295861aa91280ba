"""Weights & Biases, for those who want it: every line of metrics.jsonl, and the samples.

Best effort: the first failure in wandb prints one line and turns it off. Training goes on, with its own exit code.
"""

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from training.config import TrainConfig

WAIT_SECONDS = 15  # for wandb, at the start and at the end of a session; `wandb sync` sends later what is left then


def best_effort(method: Callable[..., None]) -> Callable[..., None]:
    """Skip a method of the tracker while wandb is off, and turn wandb off if the method fails."""

    @wraps(method)
    def attempt(self: "Tracker", *arguments: object) -> None:
        try:
            if self.on:
                method(self, *arguments)
        except Exception as error:
            self.on = False
            print(f"wandb is off, metrics.jsonl has everything: {error!r:.200}")

    return attempt


class Tracker:
    """A run in wandb; its methods do nothing if `train.wandb` is disabled."""

    def __init__(self, config: TrainConfig):
        self.config, self.on = config, config.wandb != "disabled"
        self.run_id: str | None = None  # once it has begun

    @best_effort
    def begin(self, directory: Path, run_id: str | None, tables: dict[str, dict]) -> None:
        """Begin a run in wandb, with `tables` as its configuration, or continue that of this id."""
        os.environ.setdefault("WANDB_DATA_DIR", str(directory.absolute() / "wandb"))  # instead of the user's home
        import wandb  # slow to import, and optional

        # Nothing about the machine or the code is published: no host, user, paths, packages or uncommitted changes.
        private = {"x_disable_machine_info": True, "x_save_requirements": False, "host": "", "program": "train.py"}
        waits = dict.fromkeys(("init_timeout", "login_timeout", "finish_timeout"), WAIT_SECONDS)
        self.run = wandb.init(
            project="tril",
            name=directory.name,
            id=run_id,
            resume="allow",
            dir=directory.absolute(),
            mode=self.config.wandb,
            config=tables,
            settings=wandb.Settings(**private, **waits, console="off", silent=True),
        )
        self.run.define_metric("*", step_metric="step")  # the x axis; wandb's own counts the lines of all sessions
        self.table, self.run_id = wandb.Table, self.run.id
        print(f"wandb:  {self.run.url if self.config.wandb == 'online' else self.run.sync_dir}")

    @best_effort
    def log(self, record: dict) -> None:
        """Send a line of metrics.jsonl: scores of heads as metric/layer.head, a sample as a table of one row."""
        values = {name: value for name, value in record.items() if name != "heads"}
        for metric, layers in record.get("heads", {}).items():
            values |= {f"{metric}/{i}.{j}": score for i, row in enumerate(layers) for j, score in enumerate(row)}
        if "sample" in record:
            values["sample"] = self.table(columns=["step", "text"], data=[[record["step"], record["sample"]]])
        self.run.log(values)

    @best_effort
    def finish(self, exit_code: int) -> None:
        """End the session. wandb itself notices a session that ends in an exception or a signal."""
        self.run.finish(exit_code)
