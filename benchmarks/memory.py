"""Count the memory of a GPU that training needs, on a pretended one (benchmarks/pretended_gpu.py).

Ways to run:
    python benchmarks/memory.py                                      the table of docs/train.md
    python benchmarks/memory.py configs/tinystories.toml ...         these configurations
    python benchmarks/memory.py --measure                            beside it, what this machine's GPU needs

Counted are the tensors of the certificate and of one step of train.py. A real GPU needs more: its context, workspaces of
libraries, and gaps between tensors. RESERVE is for these.

A compiled step is counted in the two graphs that torch.compile makes of the loss. A tensor has memory there if a matrix
product, the attention kernel or a reduction makes or reads it, or if the backward pass needs it. All others are taken
to be fused.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.pretended_gpu import PretendedGPU, named_cuda, pretended_gpu  # before torch

# isort: split
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table

from model import GPT, GPTConfig
from train import next_token_loss
from training.certificate import certify
from training.config import TrainConfig
from training.optimizer import clip_gradients, make_optimizer

GIB = 2**30
RESERVE = GIB
CARDS = (8, 16, 24, 80)  # GB
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
    """Return a model on the pretended GPU, without ever having its weights on the host."""
    with torch.device("cuda"):
        return GPT(config).train()


def make_batch(config: GPTConfig, batch_size: int) -> Tensor:
    """Return tokens, (B, T)."""
    return torch.zeros(batch_size, config.context_length, dtype=torch.int64, device="cuda")


def count_certificate(config: GPTConfig, train: TrainConfig, dtype: torch.dtype, compiled: bool) -> int:
    """Count the most bytes that the certificate of a run needs, with all that is on the GPU beside it."""
    with pretended_gpu() as gpu:
        model = make_model(config)
        weights = gpu.allocated
        optimizer = make_optimizer(model, train, dtype)  # Muon's momentum is there from the start
        at_rest = gpu.allocated + weights  # of which the certificate keeps a copy
        loss_fn = partial(next_token_loss, dtype=dtype)
        gpu.clear()
        if compiled:
            certify(model, lambda *_: sum(parameter.sum() for parameter in model.parameters()), dtype, train.batch_size)
        else:
            certify(model, loss_fn, dtype, train.batch_size)
        peak = gpu.peak
        del optimizer
    return max(peak, at_rest + count_graph(trace(config, train.batch_size, dtype)[0])) if compiled else peak


def count_step(config: GPTConfig, train: TrainConfig, dtype: torch.dtype, compiled: bool) -> int:
    """Count the most bytes that a step of a run needs, with all that is on the GPU beside it."""
    with pretended_gpu() as gpu:
        model = make_model(config)
        optimizer = make_optimizer(model, train, dtype)
        batch = make_batch(config, train.batch_size)[: 1 if compiled else None, : 2 if compiled else None]
        for step in range(2):
            if step == 1:  # the first one makes the state of AdamW
                gpu.clear()
            for _ in range(min(2, train.grad_accum_steps)):
                next_token_loss(model, batch, batch, dtype).backward()
            at_rest = gpu.allocated  # weights, gradients and optimizer
            clip_gradients(model, train.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
        peak = gpu.peak
        gradients = at_rest - gpu.allocated
    if not compiled:
        return peak
    forward, backward = trace(config, train.batch_size, dtype)
    before = at_rest if train.grad_accum_steps > 1 else at_rest - gradients
    return max(peak, before + count_graph(forward), before + count_graph(backward))


def trace(config: GPTConfig, batch_size: int, dtype: torch.dtype) -> tuple[fx.Graph, fx.Graph]:
    """Return the graphs of the forward and of the backward pass, split as torch.compile splits them."""
    graphs = []

    def keep(module: fx.GraphModule, inputs: list) -> object:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    with pretended_gpu() as gpu:
        model = make_model(config)
        batch = make_batch(config, batch_size)
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
    """Count the most bytes that a graph needs beside its weights: what it makes, and what the forward pass has saved."""
    nodes = list(graph.nodes)
    returned = {node for node in nodes[-1].all_input_nodes}
    memory: dict[fx.Node, set[fx.Node]] = {}  # node -> the nodes whose memory it is, or is computed from
    made = {}  # the nodes that have memory of their own -> its bytes
    reads = []  # (node, the nodes whose memory it reads), in order

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
