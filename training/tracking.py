"""Weights & Biases, for those who want it: every line of metrics.jsonl, and the samples.

Best effort: the first failure in wandb prints one line and turns it off. Training goes on, with its own exit code.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WAIT_SECONDS = 15  # for wandb, at the start and at the end of a session; `wandb sync` sends later what is left then


def best_effort(method: Callable[..., None]) -> Callable[..., None]:
    """Skip a method of the tracker while wandb is off, and turn wandb off if the method fails."""

    def attempt(self: "Tracker", *arguments: object) -> None:
        try:
            if self.mode != "disabled":
                method(self, *arguments)
        except Exception as error:
            self.mode = "disabled"
            print(f"wandb is off, metrics.jsonl has everything: {error!r:.200}")

    return attempt


@dataclass
class Tracker:
    """A run in wandb. The methods do nothing if it is disabled."""

    mode: str
    """That of `train.wandb`: disabled, offline or online."""
    run_id: str | None = None
    """The id of the run in wandb, None for a new run."""

    @best_effort
    def start_session(self, directory: Path, tables: dict[str, dict]) -> None:
        """Begin or continue the run in wandb, with `tables` as its configuration."""
        os.environ.setdefault("WANDB_DATA_DIR", str(directory.absolute() / "wandb"))  # instead of the user's home
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
            project="tril",
            name=directory.name,
            id=self.run_id,
            resume="allow",
            dir=directory.absolute(),
            mode=self.mode,
            config=tables,
            settings=settings,
        )
        self.run.define_metric("*", step_metric="step")  # the x axis; wandb's own counts the lines of all sessions
        self.run_id = self.run.id
        print(f"wandb:  {self.run.url if self.mode == 'online' else self.run.sync_dir}")

    @best_effort
    def send(self, record: dict) -> None:
        """Send a line of metrics.jsonl: scores of heads as metric/layer.head, a sample as a table of one row."""
        values = dict(record)
        for metric, layers in values.pop("heads", {}).items():
            values |= {f"{metric}/{i}.{j}": score for i, row in enumerate(layers) for j, score in enumerate(row)}
        if "sample" in record:
            import wandb

            values["sample"] = wandb.Table(columns=["step", "text"], data=[[record["step"], record["sample"]]])
        self.run.log(values)

    @best_effort
    def end_session(self, exit_code: int) -> None:
        """End the session. wandb itself notices a session that ends in an exception or a signal."""
        self.run.finish(exit_code)
