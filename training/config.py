"""The options of train.py."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from data.sources import DataConfig
from errors import UserError, check_numbers
from model import ModelConfig

Table = tyro.conf.FlagConversionOff  # --train.compile true, as in TOML, and not --train.compile

# Options of [train] that a resumed run may change. All others, of any table, would change its numbers.
MAY_CHANGE = {
    "out_dir",
    "device",
    "dtype",
    "compile",
    "deterministic",
    "max_steps",
    "eval_every",
    "log_every",
    "checkpoint_every",
    "keep_checkpoints",
    "sample_prompt",
    "sample_tokens",
    "wandb",
    "parallel",
}

AT_LEAST_1 = (
    "batch_size",
    "grad_accum_steps",
    "log_every",
    "eval_every",
    "eval_tokens",
    "checkpoint_every",
    "keep_checkpoints",
)


@dataclass(frozen=True)
class TrainConfig:
    """Options of training."""

    out_dir: str = "out/run"
    """Run directory: configuration, metrics and checkpoints."""
    init_from: str | None = None
    """Fine-tune this model: a checkpoint, a run, or OWNER/NAME of the Hugging Face hub. Left out: random weights."""
    sharp_first_layer: bool = False
    """In a qwen3 with random weights, begin with sharp attention in the first layer and soft attention above. The
    first then learns to look at the token before, and a head above can build on it, also in a short run."""
    zero_outputs: bool = False
    """In a model with random weights, begin with zero in the last layers of attention and MLPs, and in a head that is
    not tied. Each block then begins by passing on what it reads."""
    seed: int = 1337
    """Decides the first weights, the order of the text and the dropout."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU), cpu, cuda, cuda:1 or mps."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of matrix products and, if bfloat16, of the residual stream; weights stay float32.
    auto: bfloat16 where it is native (on a CPU if the model is at least 64 wide), else float16 on a CUDA
    GPU, else float32."""
    compile: Literal["auto", "false", "true", "graph"] = "auto"
    """How the loss and its gradient run. false: eagerly. true: by torch.compile. graph: eager kernels, recorded as a
    CUDA graph, for small models in short runs, where the host launches kernels more slowly than they run; same as false
    if a step is several micro-batches, with fsdp, and on a CPU. A branch in Python is taken as in the first step.
    auto: true on CUDA in a run that is long enough to pay for it, else false."""
    deterministic: bool = False
    """Use kernels that give the same bits every time, so that a resumed run ends with those of an unbroken one. On a
    CPU all kernels do; on a GPU such kernels are slower."""

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How several processes share the run: ddp divides the work; fsdp also the parameters, for large models."""

    batch_size: int = 32
    """Sequences in a micro-batch: what is in memory at once."""
    grad_accum_steps: int = 1
    """Micro-batches in a step; their gradients are averaged."""
    max_steps: int = 2000
    """Optimizer updates in the run."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW (Loshchilov and Hutter 2019), or Muon (Jordan et al. 2024) for all matrices but embeddings and head."""
    learning_rate: float = 6e-4
    """Peak of the learning rate."""
    embedding_rate: float = 1.0
    """With muon: the learning rate of embeddings, as a multiple of learning_rate. A tied head counts as one."""
    head_rate: float = 1 / 3
    """With muon: the learning rate of an untied head, as a multiple of learning_rate."""
    vector_rate: float = 1 / 3
    """With muon: the learning rate of biases and norms, as a multiple of learning_rate."""
    momentum: float = 0.9  # at a CPU's batches (benchmarks/results/first_run_cpu_2026-11-26.md)
    """Muon's memory of gradients, after 300 steps; 0.95 for steps of 100,000 tokens and more."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises to its peak."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After the warmup: cosine decay, or wsd: stable, then a straight line down."""
    decay_fraction: float = 0.4
    """Share of the run in which wsd goes down, after the warmup."""
    final_lr_fraction: float = 0.1
    """The learning rate at the end, as a share of its peak."""
    weight_decay: float = 0.1
    """Weight decay of the matrices, but with muon only of those that Muon trains; biases and norms have none."""
    beta2: float = 0.95
    """AdamW's memory of squared gradients; 0.99 for small batches."""
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 leaves it as it is."""

    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int = 250
    """Steps between two evaluations."""
    eval_tokens: int = 1_000_000
    """Number of validation tokens to evaluate on, always the first."""
    checkpoint_every: int = 250
    """Steps between two checkpoints; the last step always has one."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints to keep, besides the best."""
    sample_prompt: str = ""
    """Text that the samples continue, during the run and at its end. Empty: a new document."""
    sample_tokens: int = 64
    """Tokens of the sample at each evaluation; three times as many at the end. 0: none."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Whether Weights & Biases gets the metrics too."""

    def __post_init__(self) -> None:
        if "" in (self.out_dir, self.init_from):
            raise UserError("--train.out_dir and --train.init_from must be paths, got an empty text")
        check_numbers(
            self,
            seed=(0, 2**63 - 1),  # all bits count: `seed_for` hashes them
            max_steps=(1, 10**8 - 1),  # eight digits in the name of a checkpoint
            learning_rate=(1e-30, 1e30),
            decay_fraction=(0, 1),
            final_lr_fraction=(0, 1),
            **dict.fromkeys(("momentum", "beta2"), (0, 0.9999999)),
            **dict.fromkeys(AT_LEAST_1, (1, 1e30)),
        )


@dataclass(frozen=True)
class Config:
    """Train a GPT on text.

    Ways to start:
        python train.py                                 the Python standard library
        python train.py configs/shakespeare_char.toml   a configuration
        python train.py --data.source my.txt            a model that fits your text
        python train.py --resume out/quickstart         go on where a run stopped
        python train.py configs/finetune.toml           fine-tune a known model

    The options that people need first:
        --data.source       the text
        --train.out_dir     where the run goes
        --train.max_steps   how long it trains
        --train.batch_size  less needs less memory
        --model.n_layer     more is slower, and better if there is enough text

    Options that you leave out come from:
        configs/quickstart.toml, whose values --help shows as defaults
        training/options.py, which fits them to a text of your own
        configs/finetune.toml if there is a --train.init_from
    """

    config: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[CONFIG.toml]")] = None
    """A TOML file of options; those on the command line win."""
    resume: str | None = None
    """The run directory to continue, with its own configuration."""
    model: Table[ModelConfig] = ModelConfig()
    data: Table[DataConfig] = DataConfig()
    train: Table[TrainConfig] = TrainConfig()
    given: tyro.conf.Suppress[frozenset[str] | None] = None
    """The options that the user gave, as "train.max_steps", where the others are to be fitted to the text."""
