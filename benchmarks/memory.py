"""Count the memory that training needs on a GPU, on a pretended one (benchmarks/pretended_gpu.py).

Ways to run:
    python benchmarks/memory.py                                  the table of docs/train.md
    python benchmarks/memory.py --configs configs/my.toml        of other configurations
    python benchmarks/memory.py --measured                       beside it, what the GPU of this machine needs

Counted are the tensors of the certificate and of one step of train.py, in bfloat16. A configuration takes a minute or
two. A real GPU needs more: a context, workspaces of libraries, and gaps between tensors. RESERVE is for these.

A compiled step is counted in the two graphs that torch.compile makes of the loss. A tensor has memory there if a matrix
product, the attention kernel or a reduction makes or reads it, or if the backward pass needs it. All others are taken
to be fused.
"""

import gc
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.pretended_gpu import named_cuda, pretended_gpu  # before torch

# isort: split
import torch
import tyro
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table

from cli.options import parse
from cli.script import run_script
from errors import UserError
from model import GPT, GPTConfig
from model.device import find_device
from train import next_token_loss
from training.certificate import certify
from training.config import Config, TrainConfig
from training.device import compile_loss
from training.optimizer import clip_gradients, make_optimizer

ROOT = Path(__file__).parent.parent
GIB = 2**30
RESERVE = GIB
CARDS = (8, 16, 24, 80)  # GB, of which a GiB has more
VOCABULARIES = {"chars": 65, "bytes": 257, "gpt2": 50257, "model": 50257}  # Tiny Shakespeare has 65 characters
VIEWS = ("view", "permute", "alias", "slice", "expand", "squeeze", "unsqueeze", "t", "transpose", "detach", "select")
KERNELS = ("mm", "addmm", "bmm", "baddbmm", "attention", "attention_backward", "_unsafe_masked_index_put_accumulate")
REDUCTIONS = ("sum", "amax", "var_mean", "mean", "gather", "argmax", "prod")


class Loss(nn.Module):
    """The loss of a model, as a module that can be traced: its parameters become inputs of the graph."""

    def __init__(self, model: GPT, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor]:
        return (next_token_loss(self.model, inputs, targets, self.dtype),)


def make_model(config: GPTConfig) -> GPT:
    """Return a model on the GPU, without ever having its weights on the host."""
    with torch.device("cuda"):
        return GPT(config).train()


def make_batch(B: int, T: int) -> Tensor:
    """Return tokens, (B, T)."""
    return torch.zeros(B, T, dtype=torch.int64, device="cuda")


def measure_certificate(config: GPTConfig, train: TrainConfig, dtype: torch.dtype, loss_fn: Callable) -> int:
    """Return the most bytes on the GPU during the certificate of a run, with all that is there beside it."""
    model = make_model(config)
    optimizer = make_optimizer(model, train, dtype)  # Muon's momentum is there from the start
    torch.cuda.reset_peak_memory_stats()
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        certify(model, loss_fn, dtype, train.batch_size)
    del optimizer
    return torch.cuda.max_memory_allocated()


def measure_step(config: GPTConfig, train: TrainConfig, dtype: torch.dtype, loss_fn: Callable, batch: Tensor) -> int:
    """Return the most bytes on the GPU during a step, with all that is there beside it."""
    model = make_model(config)
    optimizer = make_optimizer(model, train, dtype)
    for _ in range(2):  # the first one makes the state of AdamW
        torch.cuda.reset_peak_memory_stats()
        for _ in range(min(2, train.grad_accum_steps)):
            loss_fn(model, batch, batch).backward()
        clip_gradients(model, train.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


def count_certificate(config: GPTConfig, train: TrainConfig, dtype: torch.dtype, compiled: bool) -> int:
    """Count what `measure_certificate` returns."""
    loss_fn = partial(next_token_loss, dtype=dtype)

    def use_all(model: GPT, *batch: Tensor) -> Tensor:
        """Stand for a compiled loss, whose memory is counted in its graph."""
        return sum(parameter.sum() for parameter in model.parameters())

    with pretended_gpu():
        peak = measure_certificate(config, train, dtype, use_all if compiled else loss_fn)
    if not compiled:
        return peak
    forward, backward = map(count_graph, trace(config, train.batch_size, dtype))
    copies = 1 if train.optimizer == "adamw" else 2  # weights, and Muon's momentum
    probed = count_weights(config, copies + 1) + forward  # beside a copy of the weights
    return max(peak, probed, count_weights(config, copies) + max(forward, backward))


def count_step(config: GPTConfig, train: TrainConfig, dtype: torch.dtype, compiled: bool) -> int:
    """Count what `measure_step` returns."""
    loss_fn = partial(next_token_loss, dtype=dtype)
    B, T = (1, 2) if compiled else (train.batch_size, config.context_length)
    with pretended_gpu():
        peak = measure_step(config, train, dtype, loss_fn, make_batch(B, T))
    if not compiled:
        return peak
    copies = 4 if train.optimizer == "adamw" else 3  # weights and moments, and gradients of other micro-batches
    at_rest = count_weights(config, copies - (train.grad_accum_steps == 1))
    return max(peak, at_rest + max(map(count_graph, trace(config, train.batch_size, dtype))))


def count_weights(config: GPTConfig, copies: int) -> int:
    """Count the bytes of so many copies of the weights, and of the masks."""
    with pretended_gpu() as gpu:
        model = make_model(config)
        return gpu.allocated + (copies - 1) * sum(parameter.nbytes for parameter in model.parameters())


def trace(config: GPTConfig, batch_size: int, dtype: torch.dtype) -> tuple[fx.Graph, fx.Graph]:
    """Return the graphs of the forward and of the backward pass, split as torch.compile splits them."""
    graphs = []

    def keep(module: fx.GraphModule, inputs: list) -> object:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    with pretended_gpu() as gpu:
        model = make_model(config)
        batch = make_batch(batch_size, config.context_length)
    compiling = mock.patch("torch.compiler.is_compiling", lambda: True)
    with named_cuda(), compiling, tracing(TracingContext(gpu.fake)):
        compiled = aot_module_simplified(
            Loss(model, dtype),
            (batch, batch),
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        with gpu.fake:
            compiled(batch, batch)[0].backward()
    return tuple(graphs)


def operator_name(node: fx.Node) -> str:
    """Return the name of a node's operator, such as "mm"; "" for an input or the output of the graph."""
    return node.target.__name__.partition(".")[0] if node.op == "call_function" else ""


def num_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's tensors."""
    values = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
    return sum(value.numel() * value.itemsize for value in values if isinstance(value, Tensor))


def count_graph(graph: fx.Graph) -> int:
    """Count the most bytes that a graph needs beside its weights: what it makes, and what was saved for it."""
    nodes = list(graph.nodes)
    returned = {node for node in nodes[-1].all_input_nodes}
    memory: dict[fx.Node, set[fx.Node]] = {}  # node -> the nodes whose memory it is, or is computed from
    made = {}  # the nodes that have memory of their own -> its bytes

    def give_memory(node: fx.Node) -> None:
        """Give a node memory of its own, or its source if it is a view."""
        while operator_name(node) in VIEWS:
            node = node.all_input_nodes[0]
        if node not in made and not node.name.startswith("primals"):
            made[node] = num_bytes(node)

    for node in nodes:
        name = operator_name(node)
        if node in returned or node.op == "placeholder" or name in REDUCTIONS + KERNELS:
            give_memory(node)
        if name in KERNELS:
            for source in node.all_input_nodes:
                give_memory(source)
    last = {}
    for place, node in enumerate(nodes):
        sources = set().union(*(memory[source] for source in node.all_input_nodes))
        memory[node] = {node} if node in made else sources
        for source in sources:
            last[source] = place
    live = peak = sum(size for node, size in made.items() if node.op == "placeholder")
    for place, node in enumerate(nodes):
        if node in made and node.op != "placeholder":
            live += made[node]
        peak = max(peak, live)
        live -= sum(made[source] for source in made if last.get(source) == place)
    return peak


def gpt_config(config: Config) -> GPTConfig:
    """Return the model of a run, with the vocabulary of its tokenizer."""
    tokenizer = config.data.tokenizer
    size = VOCABULARIES.get(tokenizer) or tokenizer.removeprefix("bpe:")
    if not str(size).isdigit():
        raise UserError(f"the vocabulary of {tokenizer!r} is not known here: give bpe:N, or {', '.join(VOCABULARIES)}")
    return GPTConfig(**asdict(config.model), vocab_size=int(size))


def largest_batches(config: GPTConfig, train: TrainConfig, dtype: torch.dtype, compiled: bool) -> list[int]:
    """Return the most sequences of a micro-batch whose step fits each of CARDS. Its memory grows evenly with them."""
    small = 8
    large = 16
    less, more = (count_step(config, replace(train, batch_size=size), dtype, compiled) for size in (small, large))
    of_one = (more - less) / (large - small)
    return [max(0, small + int((size * 1e9 - RESERVE - less) // of_one)) for size in CARDS]


def measure(config: GPTConfig, train: TrainConfig, dtype: torch.dtype) -> list[str]:
    """Return two cells more: what the certificate and a step need on this machine's GPU."""
    cells = {measure_certificate: [], measure_step: []}
    batch = make_batch(train.batch_size, config.context_length)
    torch.compiler.reset()  # it compiles a function for a few models only
    for loss_fn in (compile_loss(next_token_loss, train, batch.device), next_token_loss):
        loss_fn = partial(loss_fn, dtype=dtype)
        for work, inputs in ((measure_certificate, ()), (measure_step, (batch,))):
            try:
                found = f"{work(config, train, dtype, loss_fn, *inputs) / GIB:.1f}"
            except torch.OutOfMemoryError:
                found = "more than there is"
            cells[work].append(found)
            gc.collect()
            torch.cuda.empty_cache()
    return [" / ".join(found) for found in cells.values()]


def count(config: GPTConfig, train: TrainConfig, dtype: torch.dtype) -> list[str]:
    """Return the cells of a row of the table."""
    cells = []
    for work in (count_certificate, count_step):
        cells.append(" / ".join(f"{work(config, train, dtype, compiled) / GIB:.1f}" for compiled in (True, False)))
    fitting = (largest_batches(config, train, dtype, compiled) for compiled in (True, False))
    return cells + [f"{most:,} / {most_eager:,}" for most, most_eager in zip(*fitting, strict=True)]


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    configs: tuple[Path, ...] = tuple(
        ROOT / "configs" / f"{name}.toml" for name in ("shakespeare_char", "tinystories", "finetune", "fineweb_edu")
    )
    """The configurations. finetune is taken for GPT-2 small."""
    measured: tyro.conf.FlagCreatePairsOff[bool] = False
    """Whether to measure each on the GPU of this machine, too."""


def main(options: Options) -> None:
    if options.measured:
        find_device("cuda")  # raises UserError if there is none
    runs = [(path.stem, parse(Config, [], path)) for path in options.configs]
    models = [gpt_config(config) for _, config in runs]
    print("GiB, and sequences in a micro-batch, each compiled / uncompiled; counted, where it does not say measured\n")
    titles = ["configuration", "certificate", "a step", *(f"{size} GB hold" for size in CARDS)]
    if options.measured:
        titles += ["certificate, measured", "a step, measured"]
    print(f"| {' | '.join(titles)} |\n|---|{'---:|' * (len(titles) - 1)}")
    for (name, config), model in zip(runs, models, strict=True):
        cells = [f"{name}, {config.train.batch_size} x {model.context_length:,}"]
        cells += count(model, config.train, torch.bfloat16)
        if options.measured:
            cells += measure(model, config.train, torch.bfloat16)
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    run_script(lambda: main(parse(Options, sys.argv[1:])))
