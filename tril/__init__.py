"""See the attention of any decoder, and prove that it sees no future."""

from importlib import import_module

OFFERED = {
    "assert_causal": "decoder",
    "check_causality": "decoder",
    "find_call": "decoder",
    "UserError": "errors",
    "ablate": "experiments",
    "head_scores": "experiments",
    "influence": "experiments",
    "repeat_probe": "experiments",
    "Inspection": "inspection",
    "inspect_heads": "inspection",
    "Captured": "look",
    "capture": "look",
    "NotTheKernels": "weights",
}


def __getattr__(name: str) -> object:
    """Return what the package offers. Its file is loaded when it is asked for: errors.py needs no torch."""
    if name not in OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{OFFERED[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *OFFERED})
