#!/usr/bin/env python3
"""Train a GPT on text.

    python train.py                                 the Python standard library
    python train.py configs/shakespeare_char.toml   a configuration
    python train.py --data.source my.txt            a model that fits your text
    python train.py --resume out/quickstart         go on where a run stopped
    python train.py --help                          all options

This file is the whole story, in the order in which it happens: the loss, then the loop.
"""

import cores  # noqa: F401  before torch
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cli.script import outlives_readers, run_script
from data.batches import IGNORE, Batches, seed_for
from data.prepare import prepare
from model import GPT
from model.device import autocast, keep_freed_memory
from training.certificate import certify, prove_loss
from training.device import choose_device, choose_kernels, compile_loss, environment, record_loss, set_seed
from training.distributed import Ranks, place_model
from training.optimizer import FiniteGuard, clip_gradients, learning_rate_at, make_optimizer, set_schedule
from training.options import Config, read_config
from training.progress import Interrupt, Interrupted, Progress
from training.run import RunDirectory, make_model
from training.validation import Validation


def next_token_loss(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cross-entropy of the next tokens in nats, summed over the (B, T) targets."""
    with autocast(inputs.device, dtype):
        logits = model(inputs)  # (B, T) -> (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def train(config: Config, ranks: Ranks) -> None:
    """Train as one of `ranks`, from the beginning or from the last checkpoint."""
    device, dtype = choose_device(config.train, config.model.n_embd, ranks.local_rank)

    # 1. What an earlier session left, the text, the model that fits it, and its optimizer.
    run = RunDirectory(config, ranks)
    with ranks.first_then_others():
        corpus = prepare(config.data, began_with=run.state, model=run.base and run.base.directory)
    config = run.fit(corpus, device)
    c = config.train
    T = config.model.context_length
    tokens_per_batch = c.batch_size * T
    ranks.check(c, run.step, dtype)
    batches = Batches(corpus.tokens["train"], c.batch_size, T, c.seed)
    validation = Validation(corpus, c, T, dtype, ranks)
    model = place_model(make_model(config, corpus, run.base), c.parallel, device)
    keep_freed_memory(device)
    kernels = choose_kernels(c, device)
    optimizer = make_optimizer(model, c, dtype, kernels == "compiled" and device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run.restore(model, optimizer, scaler)

    # 2. Compile the loss, not the model, which stays a plain GPT to save. Train nothing that sees the future, and no
    # other loss than this one.
    eager = partial(next_token_loss, dtype=dtype)
    loss_fn = partial(compile_loss(next_token_loss, c, device), dtype=dtype) if kernels == "compiled" else eager
    certificate = certify(model, loss_fn, dtype, c.batch_size, corpus.tokenizer.special_tokens.values())
    if kernels == "graph":
        loss_fn = record_loss(loss_fn, model, c.batch_size, T)
    certificate |= prove_loss(model, loss_fn, eager, dtype, batches)
    run.begin(corpus, validation.probe_tokens, certificate, environment(device, dtype, kernels))

    # 3. The steps.
    guard = FiniteGuard(device)
    interrupt = Interrupt()
    with Progress(run.step, run.tokens, run.train_seconds, c.max_steps, device) as progress:
        while True:
            # The step that a session resumes is not evaluated or saved a second time.
            step = progress.step
            is_new = step > run.step
            if (is_new or step == 0) and (step % c.eval_every == 0 or step == c.max_steps):
                guard.check()
                with progress.paused("evaluating"):
                    record = validation.evaluate(model, loss_fn)
                    progress.line.write(run.log_validation(progress, record))
            stopping = step >= c.max_steps or ranks.any_rank(interrupt.received)
            if is_new and (stopping or step % c.checkpoint_every == 0):
                guard.check()
                with progress.paused("saving"):
                    run.save(progress, model, optimizer, scaler)
                    ranks.barrier()
            if stopping:
                break

            # One step: the mean loss over all tokens of its micro-batches, then one update.
            set_schedule(optimizer, step, c)
            num_micro_batches = c.grad_accum_steps  # may depend on the step; the number of ranks has to divide it
            tokens = num_micro_batches * tokens_per_batch
            losses = []
            for micro_batch in range(ranks.rank, num_micro_batches, ranks.world):
                set_seed(device, seed_for(c.seed, "dropout", step, micro_batch))
                inputs, targets = batches(progress.tokens // tokens_per_batch + micro_batch, device)
                loss = loss_fn(model, inputs, targets) / tokens
                scaler.scale(loss).backward()
                ranks.add_gradients(model)
                losses.append(loss.detach())
            ranks.share_gradients(model)
            train_loss = ranks.collect(losses).sum()
            scaler.unscale_(optimizer)
            grad_norm = clip_gradients(model, c.grad_clip)
            # A sum is finite only if both are. In float16 the norm may be infinite: the scaler skips that step.
            guard.watch(step, train_loss if scaler.is_enabled() else train_loss + grad_norm)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
            progress.made_step(tokens)
            if progress.step % c.log_every == 0 or progress.step == c.max_steps:
                guard.check()  # waits for the device, as .item() does, so not in every step
                line = {"train_loss": train_loss.item(), "lr": learning_rate_at(step, c), "grad_norm": grad_norm.item()}
                run.log(progress.step, **line, **progress.speed(line["train_loss"]))

    if step < c.max_steps:
        raise Interrupted(run.finish(step, Interrupted.exit_code))
    validation.print_sample(model)
    print(run.finish(step))


def main() -> None:
    with outlives_readers(), Ranks() as ranks:
        train(read_config(sys.argv[1:]), ranks)


if __name__ == "__main__":
    run_script(main)
