"""What many GPUs could give, on paper: an estimate from FLOPs and bytes, not a measurement.

    python benchmarks/scaling.py      the table of docs/distributed.md

A GPU computes 6 N + 12 L C T FLOPs a token (Chowdhery et al. 2022, appendix B) at the share of its peak that one alone
is assumed to reach. Once a step, weights or gradients travel around a ring. The efficiency is that of a step in which
no communication is hidden behind computation, and of one in which it is hidden as well as it can be.
"""

from dataclasses import dataclass

PEAK, REACHED = 989e12, 0.45  # FLOP/s of an H200 in bfloat16 (data sheet), and the share assumed for one alone
INSIDE = 0.8 * 450e9  # bytes/s around a ring in a node: NVLink of an H200, one direction
BETWEEN = 0.8 * 8 * 50e9  # ... through several nodes: eight adapters of 400 Gbit/s in each, over which rings are spread
GPUS_IN_A_NODE = 8
MEMORY = 141e9  # bytes of an H200


@dataclass(frozen=True)
class Model:
    """A model of the estimate."""

    name: str
    parameters: float
    n_layer: int
    n_embd: int
    context_length: int

    @property
    def state(self) -> float:
        """Bytes of weights, gradients and AdamW's two moments in float32: what fsdp divides."""
        return 16 * self.parameters

    @property
    def parallel(self) -> str:
        """ddp while the state takes no more than half of a GPU, and leaves the rest to activations."""
        return "ddp" if self.state <= MEMORY / 2 else "fsdp"

    def flops_per_token(self) -> float:
        return 6 * self.parameters + 12 * self.n_layer * self.n_embd * self.context_length


MODELS = (
    Model("124M", 124e6, 12, 768, 1024),
    Model("1.5B", 1.56e9, 48, 1600, 1024),
    Model("7B", 6.7e9, 32, 4096, 2048),
)


def seconds(model: Model, gpus: int, tokens: int) -> tuple[float, float]:
    """Of computation and of communication in a step of so many tokens, with one micro-batch a GPU.

    A ring moves (R - 1) / R of a tensor for an all-gather or a reduce-scatter. ddp does both with gradients, fsdp
    gathers weights twice and scatters gradients, for each micro-batch; all are in float32.
    """
    times = 2 if model.parallel == "ddp" else 3
    moved = times * 4 * model.parameters * (gpus - 1) / gpus
    compute = tokens / gpus * model.flops_per_token() / (PEAK * REACHED)
    return compute, moved / (INSIDE if gpus <= GPUS_IN_A_NODE else BETWEEN)


def table() -> str:
    """The estimate as Markdown."""
    lines = ["| model | with | GPUs | tokens a step | without activations | compute | communication | efficiency |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for model in MODELS:
        for gpus, tokens in ((8, 2**19), (64, 2**19), (64, 2**22)):
            rounded = 2 * model.parameters  # which autocast keeps from the forward to the backward pass
            state = rounded + model.state / (1 if model.parallel == "ddp" else gpus)
            compute, communication = seconds(model, gpus, tokens)
            worst, best = compute / (compute + communication), compute / max(compute, communication)
            lines += [
                f"| {model.name} | {model.parallel} | {gpus} | {tokens / 1e6:.1f} M | {state / 1e9:.1f} GB "
                f"| {1e3 * compute:.0f} ms | {1e3 * communication:.0f} ms | {worst:.0%} to {best:.0%} |"
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
