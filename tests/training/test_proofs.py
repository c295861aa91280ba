"""The loss that is trained is proved to be the one of train.py, and a loss that knows its targets is refused."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train
from data.batches import Batches
from errors import UserError
from model import GPT
from model.families import FAMILIES
from tests.conftest import make_gpt, often, same_bits, tiny_run
from tests.mutants import MUTANTS
from train import next_token_loss
from training.certificate import compare_with_cpu, prove_loss
from training.config import TrainConfig
from training.device import record_loss
from training.run import set_first_weights


@contextmanager
def hooked(model: GPT, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change what each attention layer returns."""
    hooks = [block.attention.register_forward_hook(lambda layer, x, y: change(y)) for block in model.blocks]
    yield
    for hook in hooks:
        hook.remove()


def half(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    return next_token_loss(model, inputs, targets, dtype) / 2


def no_gradient_into_attention(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    with hooked(model, torch.detach):
        return next_token_loss(model, inputs, targets, dtype)


def no_attention(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    with hooked(model, torch.zeros_like):
        return next_token_loss(model, inputs, targets, dtype)


def helped(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    logits = model(inputs) + F.one_hot(targets.clamp_min(0), model.config.vocab_size)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


BATCHES = Batches(np.arange(17), 3, 11, seed=0)
IMPOSTORS = [half, no_gradient_into_attention, no_attention, helped]


def prove(model: GPT, loss: Callable, dtype: torch.dtype, source: Callable = next_token_loss) -> dict[str, str]:
    source = partial(source, dtype=dtype)
    return prove_loss(model, source if loss is None else partial(loss, dtype=dtype), source, dtype, BATCHES)


@pytest.mark.parametrize("impostor", IMPOSTORS, ids=lambda impostor: impostor.__name__)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", often(*FAMILIES))
def test_another_loss_than_that_of_the_source_is_refused(
    family: str, dtype: torch.dtype, dropout: float, impostor: Callable
) -> None:
    model = make_gpt(family=family, n_embd=18, dropout=dropout).train()
    refused = r"the loss as it is trained agrees with its source only to .*, in (the loss|.*\.(weight|bias))"
    with pytest.raises(UserError, match=refused):
        prove(model, impostor, dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("zero_outputs", [False, True])  # True: all gradients are zero, and in a nanochat all logits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_loss_is_proved_and_leaves_no_trace(
    family: str, dtype: torch.dtype, zero_outputs: bool, dropout: float, capsys: pytest.CaptureFixture
) -> None:
    model = make_gpt(family=family, n_embd=18, dropout=dropout).train()
    set_first_weights(model, TrainConfig(zero_outputs=zero_outputs))
    model.blocks[1].mlp.down_proj.weight.requires_grad = False
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    record = prove(model, lambda *inputs, dtype: next_token_loss(*inputs, dtype), dtype)
    assert (
        record["agrees_with_source"].startswith("to 0.0e+00") and record["loss"] == "is the cross-entropy of the logits"
    )
    assert record["agrees_with_cpu"].startswith("to ")
    assert same_bits(before, model.state_dict()) and torch.equal(random, torch.get_rng_state())
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "loss:   is the cross-entropy of the logits" and all(len(line) <= 80 for line in said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_that_computes_something_else_is_refused(family: str, dtype: torch.dtype) -> None:
    model = make_gpt(family=family, n_embd=18, dropout=0.3).train()
    eager = partial(next_token_loss, dtype=dtype)
    with torch.no_grad():
        model.blocks[0].attention.o_proj.weight[0] *= 1e3  # as in trained models, which round more
    _, how_far = compare_with_cpu(model, eager, dtype)  # of a CPU with itself, in this precision
    assert how_far.startswith("to ") and model.training
    layer = model.blocks[1].attention
    attend = layer.attend.forward
    # Heads in another order.
    layer.attend.forward = lambda *inputs, **options: attend(*inputs, **options).roll(1, dims=1)
    refused = "refusing to train: cpu agrees with a CPU in float32 only to .*, in .*: use another device or dtype"
    with pytest.raises(UserError, match=refused):
        compare_with_cpu(model, eager, dtype)


def test_a_loss_is_said_to_be_more_than_a_cross_entropy_and_refused_if_it_is_less() -> None:
    def more(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        return next_token_loss(model, inputs, targets, dtype) + 0.1 * targets.numel()

    def smooth(model: GPT, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        return F.cross_entropy(model(inputs).mT, targets, reduction="sum", label_smoothing=0.1)

    assert prove(make_gpt().train(), None, torch.float32, more)["loss"].startswith("is 3.")
    assert prove(make_gpt().train(), None, torch.float32, more)["loss"].endswith(
        "% more than the cross-entropy of the logits"
    )
    assert "%" not in prove(make_gpt(dropout=0.3).train(), None, torch.float32)["loss"]
    prove(make_gpt().train(), None, torch.float32, smooth)
    with pytest.raises(UserError, match="of random targets the loss is .*% less than the cross-entropy of the logits"):
        prove(make_gpt().train(), None, torch.float32, helped)


@pytest.mark.parametrize("impostor", IMPOSTORS, ids=lambda impostor: impostor.__name__)
def test_a_compiler_that_is_wrong_trains_nothing(
    impostor: Callable, run, corpus_file, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile(function: Callable, **_: object) -> Callable:
        return impostor if function is next_token_loss else function

    monkeypatch.setattr(torch, "compile", compile)
    words = tiny_run(corpus_file, tmp_path / "run", train__compile="true")
    run(train, *words).refused("the loss as it is trained agrees with its source only to")
    assert not (tmp_path / "run").exists()


def of_other_weights(loss: nn.Module, example: tuple) -> Callable:
    return copy.deepcopy(loss)


def of_its_first_batch(loss: nn.Module, example: tuple) -> Callable:
    return lambda *batch: loss(*example)


def of_the_batch_when_it_was_recorded(loss: nn.Module, example: tuple) -> Callable:
    batches = []
    return lambda *batch: batches.append(batch) or loss(*batches[min(1, len(batches) - 1)])


@pytest.mark.parametrize("record", [of_other_weights, of_its_first_batch, of_the_batch_when_it_was_recorded])
def test_a_recorded_graph_that_is_wrong_is_refused(record: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = partial(next_token_loss, dtype=torch.float32)
    model = make_gpt().train()
    for wrong in (lambda loss, example: loss, record):
        monkeypatch.setattr(torch.cuda, "make_graphed_callables", wrong)
        graph = record_loss(eager, model, 3, model.config.context_length)
        refused = pytest.raises(UserError, match="agrees with its source only to .* train with --train.compile false")
        with refused if wrong is record else nullcontext():
            prove_loss(model, graph, eager, torch.float32, BATCHES)


def test_targets_that_each_position_has_read_are_not_trained(run, corpus_file, tmp_path, monkeypatch) -> None:
    """Whoever changes how a batch is cut: no proof of the model and of the loss alone would notice."""
    words = tiny_run(corpus_file, tmp_path / "run")
    MUTANTS["targets are the inputs"](monkeypatch)
    run(train, *words).refused("the targets are the inputs, which each position has read")
    assert not (tmp_path / "run/checkpoints").exists()
    one_token = Batches(np.full(17, 7), 3, 11, seed=0)  # of which it cannot be told
    eager = partial(next_token_loss, dtype=torch.float32)
    prove_loss(make_gpt(), eager, eager, torch.float32, one_token)


def test_what_a_forward_pass_moves_is_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x

    model = make_gpt().train()
    model.embedding_dropout = Counting()
    model.register_buffer("mask", torch.ones(1, dtype=torch.bool).expand(5))  # which nothing can be written to
    prove(model, None, torch.bfloat16)
    assert model.embedding_dropout.count == 0
