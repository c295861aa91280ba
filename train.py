#!/usr/bin/env python3
"""Train a GPT on text.

Ways to start:
    python train.py                                 the Python standard library
    python train.py configs/shakespeare_char.toml   a configuration
    python train.py --data.source my.txt            a model that fits your text
    python train.py --resume out/quickstart         go on where a run stopped
    python train.py configs/finetune.toml           fine-tune a known model

Without a configuration:
    configs/quickstart.toml, whose values --help shows as defaults
    training/recipe.py changes it for a text of your own
    configs/finetune.toml if there is a --train.init_from
"""

import math
import os
import sys
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from configs import ConfigError, parse, run_script, visible
from data.batches import IGNORE, Batches, seed_for, validation_batches
from data.prepare import DataConfig, prepare
from data.tokenizer import END_OF_TEXT, document_start, encode, token_bytes, token_lengths
from inspection import as_json, head_scores, repeat_probe
from model import GPT, GPTConfig, ModelConfig
from model.checkpoint import STEP, find_checkpoint, runs_beside
from model.parts import whole
from model.sampling import stream
from training.certificate import certify
from training.config import TrainConfig
from training.device import (
    advice_if_not_compiled,
    after_compiling,
    attention_kernel,
    autocast,
    choose_device,
    device_type,
    environment,
    peak_tokens_per_second,
    set_seed,
)
from training.distributed import Ranks, job, joined, said_by_first
from training.finetune import check_shape, config_of, describe_finetuning, find_shape, with_context
from training.memory import advice_if_out_of_memory, chunked_loss, keep_freed_memory, memory_line
from training.optimizer import FiniteGuard, learning_rate_at, make_optimizer, set_schedule, where_it_broke
from training.progress import Interrupt, Interrupted, Outliving, Progress, WorstLoss, rehearse, time_line
from training.recipe import choose_shape, choose_steps, describe, measure
from training.run import Run
from training.verify import verify_resume

HEADS_TOKENS = 256  # of validation text on which heads are measured at each evaluation
Table = tyro.conf.FlagConversionOff  # --train.compile true, as in TOML, and not --train.compile
QUICKSTART, FINETUNE = (Path(__file__).parent / "configs" / f"{name}.toml" for name in ("quickstart", "finetune"))


@dataclass(frozen=True)
class Config:
    __doc__ = __doc__

    config: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(metavar="[CONFIG.toml]")] = None
    """A TOML file of options; those on the command line win."""
    resume: Path | None = None
    """The run directory to continue, with its own configuration."""
    verify_resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Do not train, but check on this machine that a run that is killed and resumed ends in the same bits."""
    depth: int | None = None
    """Layers of a model for this text: 4, 6, 8 or 12; all else follows. None: as many as fit it and the device."""
    model: Table[ModelConfig] = ModelConfig()
    data: Table[DataConfig] = DataConfig()
    train: Table[TrainConfig] = TrainConfig()
    why: tyro.conf.Suppress[str] = ""  # so: what was chosen, if no file says it


def read_config(argv: list[str]) -> Config:
    """Defaults, then a file, then the command line. Raises ConfigError or ModelError for what does not fit."""
    if {"-h", "--help"} & {*argv}:  # with a configuration's values as defaults
        is_finetuning = any(word.replace("-", "_").startswith("__train.init_from") for word in argv)
        otherwise = FINETUNE if is_finetuning else QUICKSTART
        file = next((Path(word) for word in argv if word.endswith(".toml")), otherwise)
        parse(Config, argv, defaults=parse(Config, [], file))
    asked = parse(Config, argv)
    if asked.verify_resume and "RANK" in os.environ:
        raise ConfigError("--verify_resume makes runs of its own: not under torchrun")
    if asked.resume and asked.verify_resume:
        raise ConfigError("--verify_resume makes runs of its own: give it a configuration instead of --resume")
    if asked.resume and (asked.config or asked.depth is not None or asked.train.out_dir != TrainConfig.out_dir):
        raise ConfigError("--resume takes configuration and directory from the run: give no other with it")
    if asked.resume and not (asked.resume / "config.toml").is_file():
        is_step = "; of a run with such a checkpoint, give the directory" if STEP.fullmatch(asked.resume.name) else ""
        beside = is_step or runs_beside(asked.resume)
        raise ConfigError(f"{asked.resume} is not the directory of a run: it has no config.toml{beside}")
    if asked.resume:
        return parse(Config, [*argv, "--train.out_dir", str(asked.resume)], asked.resume / "config.toml")
    has_one, has_text = asked.config or asked.train.init_from, asked.data.source != DataConfig.source
    if asked.depth is not None and (has_one or "RANK" in os.environ):
        raise ConfigError("--depth chooses a configuration: not with another one, train.init_from or torchrun")
    file = asked.config or (FINETUNE if asked.train.init_from else QUICKSTART)
    config = parse(Config, argv, file)
    if not has_one and (has_text or asked.depth is not None):
        if "RANK" in os.environ:  # ranks might see another text, or none when they begin again
            config = replace(config, why=f"{QUICKSTART.name}: several processes choose none for a text")
        else:
            config = choose(argv, config)
    if init_from := config.train.init_from:
        base = find_checkpoint(Path(init_from))
        shape = find_shape(base)
        config = parse(Config, argv, file, Config(model=with_context(shape), data=DataConfig(tokenizer="model")))
        check_shape(config.model, shape, config.data.tokenizer, init_from)
        config = replace(config, why="" if asked.config else describe_finetuning(config.train, base))
    GPTConfig(**asdict(config.model))  # raises ModelError now, not after an hour of preparing data
    return config


def choose(argv: list[str], config: Config) -> Config:
    """The quickstart's configuration, changed for the text that it names; what is in argv stays as it is."""
    kind, (num_bytes, tokenizer) = device_type(config.train.device), measure(config.data)
    shape = choose_shape(config.model, config.data, config.train, num_bytes, tokenizer, kind, config.depth)
    config = parse(Config, argv, defaults=Config(**shape))
    steps = choose_steps(config.model, config.data, config.train, num_bytes, kind, quick=config.depth is None)
    config = parse(Config, argv, defaults=Config(model=config.model, data=config.data, train=steps))
    return replace(config, why=describe(config.model, config.data, config.train, num_bytes))


def next_token_loss(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """How surprised the model is by the next tokens: cross-entropy in nats, summed over the (B, T) targets."""
    with autocast(inputs.device, dtype):
        if model.activation_checkpointing:
            return chunked_loss(model, inputs, targets)
        logits = model(inputs)  # (B, T) -> (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


@torch.no_grad()
def evaluate(
    loss_fn: Callable[..., Tensor], model: GPT, batch_size: int, tokens: np.ndarray, interrupt: Interrupt, ranks: Ranks
) -> float | None:
    """Mean loss in nats a token over all `tokens`, which are the same at every evaluation; None if interrupted."""
    device, T = model.lm_head.weight.device, model.config.context_length
    losses, stopped = torch.zeros(math.ceil(len(tokens) / (batch_size * T)), device=device), False
    model.eval()
    for i, batch in enumerate(validation_batches(tokens, batch_size, T, device, ranks.rank, ranks.world)):
        if stopped := ranks.any(interrupt):
            break
        losses[i] = loss_fn(model, *batch)
    model.train()
    # The sum is exact, so that it does not depend on who has computed what.
    return None if stopped else math.fsum(ranks.collect([*losses]).tolist()) / (len(tokens) - 1)


def measure_heads(model: GPT, val_tokens: np.ndarray, start: list[int]) -> dict[str, list[list[float | None]]]:
    """Measure every head on one text and one probe of the validation tokens: metric -> L rows of H numbers.

    start: the ids between two documents.
    """
    T = model.config.context_length
    text = torch.from_numpy(val_tokens[: min(T, HEADS_TOKENS)].astype(np.int64))[None]
    words = torch.from_numpy(np.setdiff1d(val_tokens, start).astype(np.int64))
    return as_json(head_scores(model, text, repeat_probe(words, start[-1], T, num=1), verify=False))


def main() -> None:
    with said_by_first():
        config = read_config(sys.argv[1:])
    if config.verify_resume:
        verify_resume(config)
        return
    with redirect_stdout(Outliving(sys.stdout)), redirect_stderr(Outliving(sys.stderr)):
        with joined(config.train) as ranks, advice_if_out_of_memory(config.train, resumed=bool(config.resume)):
            train(config, ranks)


@advice_if_not_compiled("with --train.compile false")
def train(config: Config, ranks: Ranks) -> None:
    """Train, or go on training, as the configuration says; one of `ranks`, if there are several."""
    c, T = config.train, config.model.context_length

    # What to train on, what to train, and where an earlier session left off.
    if config.why:
        print(f"config: {config.why}")
    run = Run(config, writes=ranks.is_first, job=job())
    state = run.state  # step, train_seconds, the best validation loss
    if state["step"] > c.max_steps or run.evaluated == c.max_steps:
        run.report()
        print(f"{run.directory} is already at step {state['step']}, of {c.max_steps}: nothing to do")
        return
    interrupt = Interrupt(state, says=ranks.is_first)
    device, dtype = choose_device(c, config.model.n_embd, ranks.local_rank)
    corpus = ranks.first_then_others(partial(prepare, config.data, fingerprint=state["fingerprint"], model=run.base))
    print(f"data:   {visible(str(corpus))}")
    batches = Batches(corpus.tokens["train"], c.batch_size, T, c.seed)
    val_tokens = corpus.tokens["val"][: c.eval_tokens + 1]
    val_bytes = token_lengths(corpus.tokenizer)[val_tokens[1:]].sum()
    bits_per_byte_per_nat = (len(val_tokens) - 1) / val_bytes / math.log(2)

    prompt = [*document_start(corpus.tokenizer), *encode(corpus.tokenizer, c.sample_prompt).tolist()]
    run.begin(corpus)
    torch.manual_seed(seed_for(c.seed, "weights"))
    model = GPT(config_of(config.model, run.base, corpus.tokenizer.n_vocab)).train()
    run.restore_weights(model)
    print(f"model:  {config.model.family}, {sum(p.numel() for p in model.parameters()):,} parameters")
    model.activation_checkpointing = c.activation_checkpointing
    compiled = c.compile if c.compile is not None else device.type == "cuda"
    if ranks.world > 1:
        print(f"ranks:  {ranks.world}, {c.parallel}, {c.grad_accum_steps // ranks.world} micro-batches of a step each")
    eager_loss = partial(next_token_loss, dtype=dtype)
    if c.parallel != "fsdp":  # whose ranks share out what is counted here
        print(f"memory: {memory_line(model, c, eager_loss, device, compiled, bool(config.resume))}")
    keep_freed_memory(model, c, device)
    ranks.join(device, dtype, state["step"])
    ranks.place(model, device, dtype)

    # Compile the loss, not the module: the model stays a plain GPT to save, sample from and inspect.
    loss_fn = partial(torch.compile(next_token_loss, dynamic=False), dtype=dtype) if compiled else eager_loss
    certificate = certify(model, loss_fn, dtype, c.batch_size)  # not a step with a model that sees the future
    print(f"kernel: {(kernel := attention_kernel(model, dtype))}")
    run.start(certificate, environment(device, dtype, compiled) | {"attention": kernel, "ranks": ranks.order()})
    training_loss = ranks.sharing_gradients(model, loss_fn)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    tokens_per_step = c.batch_size * c.grad_accum_steps * T

    def micro_batch_loss(loss_fn: Callable[..., Tensor], step: int, micro_batch: int) -> Tensor:
        set_seed(device, seed_for(c.seed, "dropout", step, micro_batch))
        inputs, targets = batches(step * c.grad_accum_steps + micro_batch, device)
        return loss_fn(model, inputs, targets) / tokens_per_step

    def backward(step: int, micro_batch: int) -> Tensor:
        loss = micro_batch_loss(training_loss, step, micro_batch)
        scaler.scale(loss).backward()
        return loss.detach()

    # How long it will take; the optimizer is made when the rehearsal's own, with as much memory, is gone.
    if state["step"] < c.max_steps:
        seconds = rehearse(model, c, partial(backward, state["step"]), ranks.micro_batches)
        eval_batches = len(val_tokens) / T / c.batch_size
        expected = time_line(c, state["step"], run.evaluated, *seconds, eval_batches)
        print(f"time:   {expected}{after_compiling(compiled)}")
    optimizer = make_optimizer(model, c)
    run.restore(model, optimizer, scaler)

    def diagnose(step: int) -> str:
        return where_it_broke(model, partial(micro_batch_loss, eager_loss, step), c.grad_accum_steps)

    def log_spike() -> None:
        if spike := run.log_spike(*worst.take(), batches):
            progress.write(spike)

    guard, worst = FiniteGuard(optimizer, device, diagnose), WorstLoss(device)
    peak = ranks.world * peak_tokens_per_second(model, device)
    with Progress(state, c.max_steps, tokens_per_step, peak, device) as progress:
        while True:
            # Measure and save, unless that was done before the run was resumed here.
            step = state["step"]
            if (step % c.eval_every == 0 or step == c.max_steps) and step != run.evaluated:
                guard.check()
                with progress.paused("evaluating"):
                    with autocast(device, dtype):
                        text = sample(model, corpus.tokenizer, prompt, c.sample_tokens, partial(ranks.any, interrupt))
                    val_loss = evaluate(loss_fn, model, c.batch_size, val_tokens, interrupt, ranks)
                    if val_loss is not None:
                        with autocast(device, dtype):
                            heads = measure_heads(model, val_tokens, document_start(corpus.tokenizer))
                        bits_per_byte = val_loss * bits_per_byte_per_nat
                        progress.write(run.log_validation(val_loss, bits_per_byte, heads, text))
            stopping = step == c.max_steps or ranks.any(interrupt)
            if (stopping or (step % c.checkpoint_every == 0 and step > 0)) and step != run.resumed_step:
                guard.check()
                log_spike()
                with progress.paused("saving"):
                    run.save(model, optimizer, scaler)
                    ranks.wait_for_first()
            if stopping:
                break

            # One step: the mean loss over all tokens of grad_accum_steps micro-batches, then one update.
            set_schedule(optimizer, step, c)
            losses = [backward(step, micro_batch) for micro_batch in ranks.micro_batches(model)]
            train_loss = ranks.collect(losses).sum()
            scaler.unscale_(optimizer)
            grad_norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), c.grad_clip or math.inf))
            worst.watch(step, train_loss)
            guard.watch(step, train_loss if scaler.is_enabled() else train_loss + grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            progress.step()

            if state["step"] % c.log_every == 0 or state["step"] == c.max_steps:
                guard.check()  # reads the device, as .item() does: not in every step
                mean_loss, lr = train_loss.item(), learning_rate_at(step, c)
                run.log(train_loss=mean_loss, lr=lr, grad_norm=grad_norm.item(), **progress.speed(mean_loss))
                log_spike()

    if run.evaluated != c.max_steps:
        run.finish(Interrupted.exit_code)
        raise Interrupted(f"saved step {state['step']}; continue with: {run.command('train.py --resume')}")
    with autocast(device, dtype):
        if c.sample_tokens:
            text = sample(model, corpus.tokenizer, prompt, 3 * c.sample_tokens)
            print(f"\nA sample of what it writes:\n{visible(text)}\n")
            run.tracker.log({"step": step, "sample": text})
    run.finish()
    if state["best_step"] not in (None, step):
        print(f"The best validation loss, {state['best_val_loss']:.4f}, was that of step {state['best_step']}.")
    print(f"Next, with the model in {run.directory}, where report.html shows how it went:")
    for _, command in run.next_commands():
        print(f"  {command}")


def sample(
    model: GPT, tokenizer: tiktoken.Encoding, prompt: list[int], length: int, stopped: Callable[[], bool] = bool
) -> str:
    """The prompt, a list of tokens that begins with the start of a document, as the model would continue it.

    stopped: asked after each token whether to break off; by default never.
    """
    idx = torch.tensor([prompt], device=model.lm_head.weight.device)
    tokens = prompt[len(document_start(tokenizer)) :]
    with closing(stream(model, idx, length, temperature=0.8, top_k=50, seed=0)) as new:
        tokens += [token.item() for token in takewhile(lambda token: not stopped(), new)]
    text = b"".join(token_bytes(tokenizer, token) for token in tokens).decode(errors="replace")
    return text.split(END_OF_TEXT)[0]


if __name__ == "__main__":
    run_script(main)
