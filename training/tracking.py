"""Weights & Biases, for those who want it: the lines of metrics.jsonl, the last sample, and the finished model.

wandb only looks on. Whatever fails in it costs one printed line, and neither a step nor the exit code.
"""

import json
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from training.config import TrainConfig

WAIT_SECONDS = 15  # for wandb, at the beginning of a session and at its end; `wandb sync` sends what was left then
UPLOAD_SECONDS = 600  # at its end if there are checkpoints to upload


def optional(method: Callable[..., None]) -> Callable[..., None]:
    """Let a method of the tracker do nothing while that is off, and an error turn it off."""

    @wraps(method)
    def attempt(self: "Tracker", *arguments: object) -> None:
        try:
            if self.on:
                method(self, *arguments)
        except Exception as error:
            self.on = False
            reason = str(error).partition("\n")[0]
            print(f"wandb is off, metrics.jsonl has everything: {type(error).__name__}: {reason}")

    return attempt


class Tracker:
    """A run in wandb, or nothing."""

    def __init__(self, config: TrainConfig):
        self.config, self.on = config, config.wandb != "disabled"

    @optional
    def begin(self, directory: Path, state: dict, tables: dict[str, dict]) -> None:
        """Begin a run in wandb with these tables as its configuration, or continue that of `state["wandb_id"]`."""
        place = directory.absolute() / "wandb"
        os.environ.setdefault("WANDB_DATA_DIR", str(place))  # files wait there for their upload, not in the user's home
        import wandb  # slow, and not installed everywhere

        settings = wandb.Settings(
            init_timeout=WAIT_SECONDS,
            login_timeout=WAIT_SECONDS,  # if it asks for a key on a terminal
            finish_timeout=UPLOAD_SECONDS if self.config.wandb_checkpoints else WAIT_SECONDS,
            console="off",  # our output is ours
            silent=True,
            # Nobody has asked to publish the names of host and user, paths, packages or an uncommitted diff.
            x_disable_machine_info=True,
            x_save_requirements=False,
            host="",
            program="train.py",
        )
        self.run = wandb.init(
            project="tril",
            group=self.config.wandb_group,
            name=directory.name,
            id=state["wandb_id"],
            resume="allow",
            dir=directory.absolute(),
            mode=self.config.wandb,
            config=tables,
            settings=settings,
        )
        self.run.define_metric("*", step_metric="step")  # the x axis; wandb's own counts lines, over all sessions
        self.wandb = wandb
        self.newest = place / f"{self.run.id}.json"  # the last step of each kind of line that wandb knows
        self.known = read_steps(self.newest)
        self.last = dict(self.known)
        state["wandb_id"] = self.run.id
        print(f"wandb:  {self.run.url if self.config.wandb == 'online' else self.run.sync_dir}")

    @optional
    def log(self, record: dict) -> None:
        """A line of metrics.jsonl; a sample becomes a table of one row.

        After a crash some steps are computed again. wandb has them and cannot take them back, so it gets no second
        line for them: it would say the same.
        """
        kind = next(key for key in record if key != "step")
        if record["step"] > self.known.get(kind, -1):
            heads = {
                f"{metric}/{layer}.{head}": value
                for metric, layers in record.get("heads", {}).items()
                for layer, row in enumerate(layers)
                for head, value in enumerate(row)
            }
            values = {name: value for name, value in record.items() if name != "heads"} | heads
            if "sample" in record:
                row = [record["step"], self.config.sample_prompt, record["sample"]]
                values["sample"] = self.wandb.Table(columns=["step", "prompt", "text"], data=[row])
            self.run.log(values)
            self.last[kind] = record["step"]
            temporary = self.newest.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.last))
            temporary.replace(self.newest)

    @optional
    def log_checkpoint(self, directory: Path, *aliases: str) -> None:
        """A checkpoint, as an artifact."""
        artifact = self.wandb.Artifact(f"model-{self.run.id}", type="model")
        for file in sorted(directory.iterdir()):
            artifact.add_file(str(file), policy="immutable")  # no copy of it: a checkpoint is never written to again
        self.run.log_artifact(artifact, aliases=[directory.name, *aliases])

    @optional
    def finish(self, exit_code: int) -> None:
        """This session is over. (One that ends in an exception or a signal wandb notices by itself.)"""
        self.run.finish(exit_code)


def read_steps(path: Path) -> dict[str, int]:
    """What `log` has written down, in this session or one before."""
    return json.loads(path.read_text()) if path.exists() else {}
