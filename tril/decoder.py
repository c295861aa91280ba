"""Run any decoder: a module that takes token ids, (B, T), and returns logits, (B, T, V), or something that has them.

`find_call` finds how a model is called, by calling it:

    decoder = find_call(model)
    print(decoder)              model(ids, targets=ids)[0]
    decoder(idx)                (B, T) int64 -> logits (B, T, V)

Shapes: B texts, T time (tokens), V vocabulary, C channels.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tril import causality
from tril.causality import Causality, logits_of
from tril.errors import UserError, errors_as_user_error

# Names of the number of tokens that a model can read.
CONTEXTS = (
    "context_length max_position_embeddings block_size n_positions n_ctx seq_len sequence_len max_seq_len".split()
)
TEXTS = 3  # that are read to find the call: another number than that of their tokens
USUAL = 64  # tokens that are probed where nothing says what a model can read
LENGTHS = (USUAL, 128, 31, 13, 7)  # tokens that are tried there
LARGE = 4e9  # weights times tokens: a larger model is probed in as many tokens as that


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the weights; the CPU if there are none."""
    return next(model.parameters(), torch.empty(0)).device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode inside the `with` block, and each of its parts back into its mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def read(model: nn.Module, idx: Tensor, positions: slice | Tensor = slice(None)) -> Tensor:
    """Return the logits of some positions of a text, (B, T) -> (B, positions, V). A known head computes no others.

    Raises UserError if the model cannot read the text, or returns no logits of all positions.
    """
    idx = idx.to(device_of(model))
    T = idx.size(1)
    was_cut = []

    def cut(head: nn.Module, inputs: tuple) -> tuple | None:
        """Hand on the hidden states of these positions alone, as a hook before the head."""
        if inputs and inputs[0].shape[:-1] == idx.shape:
            was_cut.append(True)
            return (inputs[0][:, positions], *inputs[1:])

    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "lm_head", None))()
    can_cut = isinstance(head, nn.Linear)  # another may mix the positions
    with errors_as_user_error(f"the model cannot read {T} tokens, given as model(idx)"):
        with head.register_forward_pre_hook(cut) if can_cut else nullcontext():
            output = model(idx)
    with errors_as_user_error("the model has to return logits"):
        logits = logits_of(output)
    if was_cut:
        return logits
    if logits.size(1) != T:
        raise UserError(f"of {T} tokens the model returns logits of {logits.size(1)}, not of all")
    return logits[:, positions]


# How a model is called.

TARGETS = ("targets", "target", "target_seq", "labels", "y")
POSITIONS = ("positions", "position_ids", "input_pos", "cache_position")
HELPERS = {"attention_mask": "ones_like(ids)", **dict.fromkeys(POSITIONS, "arange(T).expand_as(ids)")}
FILL = dict.fromkeys(TARGETS, "ids") | HELPERS  # what arguments of these names are given
IDS = r"\bids\b"
LAYOUTS = ("", ".mT", ".transpose(0, 1)", ".unflatten(0, ids.shape)")  # how an output becomes (*ids.shape, V)
PLAIN = re.compile(r"model(\.\w+)?\((input_ids=)?ids\)(\[0\]|\.logits|\['logits'\])?")  # as `logits_of` finds logits


class Seen(TorchFunctionMode):
    """Sees the logits that a cross-entropy is given, and the number of rows of an embedding that reads these ids."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids.flatten().sort().values
        self.rows = 0

    def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        if function is F.embedding and torch.equal(args[0].flatten().sort().values, self.ids):
            self.rows = len(args[1])
        if function is F.cross_entropy:
            self.logits = args[0]
        return function(*args, **kwargs or {})


def of_loss(function: Callable) -> Callable:
    """Return a function that returns the logits, (*ids.shape, V), of which a model computes its loss."""

    def call(*inputs: Tensor, **options: Tensor) -> Tensor:
        ids = (*inputs, *options.values())[0]
        with Seen(ids) as seen:
            function(*inputs, **options)
        return seen.logits.mT if seen.logits.dim() > 2 else seen.logits.unflatten(0, ids.shape)

    return call


def joined(function: Callable) -> Callable:
    """Return a function that joins the chunks of logits that a model returns."""
    return lambda *inputs, **options: torch.cat(function(*inputs, **options), -2)


NOTES = {"": lambda function: function, ", joined": joined, ", logits as its cross_entropy got them": of_loss}


@dataclass(frozen=True)
class Decoder:
    """A model and how it is called: ids, (B, T) int64 -> logits, (B, T, V). `str` says how, in one line."""

    module: nn.Module
    """The module that has the weights, without what wraps it."""
    function: Callable
    """What is called: the module, one that holds it, or a function that calls it."""
    line: str
    """How: the expression that is evaluated, where `model` or `call` is the function. It may have one of NOTES."""
    vocab_size: int = 0
    """V, the size of the logits."""
    num_ids: int = 0
    """How many ids there are: less than V, if the embedding has fewer rows."""
    context_length: int | None = None
    """The most tokens that the model can read, if its config says so."""
    length: int = USUAL
    """How many tokens the model can read, if its config says so; else a number that it did read."""

    def __str__(self) -> str:
        return self.line

    def __call__(self, idx: Tensor) -> Tensor:
        """Return the logits of all positions."""
        output = self.evaluate(idx.to(device_of(self.module)))
        return torch.stack(output) if isinstance(output, list) else output

    def evaluate(self, ids: Tensor) -> object:
        """Evaluate the line, so that what is said is what is done."""
        line = self.line
        function = self.function
        for note, change in NOTES.items():
            if note in line:
                line = line.replace(note, "")
                function = change(function)
        arange = partial(torch.arange, device=ids.device)
        names = {"ids": ids, "T": ids.size(-1), "ones_like": torch.ones_like, "arange": arange}
        return eval(line, names | {"model": function, "call": function})

    def as_module(self) -> nn.Module:
        """Return a module from ids to logits: the model itself, if it is called with ids alone and returns them."""
        return self.module if PLAIN.fullmatch(self.line) else Called(self)


class Called(nn.Module):
    """A module from ids, (B, T), to logits, (B, T, V), by the way in which a model is called."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.module = decoder.module
        self.decoder = decoder

    def forward(self, idx: Tensor) -> Tensor:
        """Return the logits of all positions."""
        return self.decoder(idx)


def parts(output: object) -> dict[str, object]:
    """Return what a model returns, or what is in it, by the expression that takes it out."""
    if isinstance(output, Tensor):
        return {"": output}
    if isinstance(output, list | tuple):
        output = dict(enumerate(output))
    if isinstance(output, Mapping):
        return {f"[{key!r}]": value for key, value in output.items()}
    return {f".{name}": value for name, value in getattr(output, "__dict__", {}).items()}


def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and what it wraps, from without: DataParallel and its kind, averages of weights, compiled ones."""
    while isinstance(model, nn.Module):
        yield model
        of_torch = type(model).__module__.startswith(("torch.", "lightning"))
        model = of_torch and getattr(model, "_orig_mod", getattr(model, "module", None))


def context_of(*models: object) -> int | None:
    """Return how many tokens a model can read, if it, its config, or one that wraps it has a name of CONTEXTS."""
    for model in models:
        config = getattr(model, "config", getattr(model, "cfg", None))
        for owner, name in product((config, getattr(config, "text_config", None), model), CONTEXTS):
            found = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
            if isinstance(found, int):
                return found


def find_call(
    model: nn.Module, vocab_size: int | None = None, length: int | None = None, call: Callable | None = None
) -> Decoder:
    """Find how a model is called, and where the logits of all positions, (B, T, V), are in what it returns.

    The ids are given as (B, T); as (T, B), if texts influence each other in that way alone; as (T,), if several cannot
    be read. Where these are not enough, targets, a mask of ones and positions are passed, by the names that `forward`
    has. vocab_size, length: V and the most tokens, if they are known. call: a function of ids, to be called in place of
    the model.

    Raises UserError, which says what was tried and what came back, if no logits are found.
    """
    if isinstance(model, type):
        raise UserError(f"{model.__name__} is a class: give a model that it makes, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise UserError(f"expected a model, an nn.Module, got {type(model).__name__}")
    *wrappers, module = unwrapped(model)
    if device_of(module).type == "meta":
        raise UserError("the model is on the meta device, where it has no weights: put it on another, and load them")
    inside = {"model": module, "model.model": getattr(module, "model", None), "model.net": getattr(module, "net", None)}
    context = length or context_of(*inside.values(), *wrappers)
    said = {}
    for (name, inner), T in product(inside.items(), (min(USUAL, context), context) if context else LENGTHS):
        # Inside is the decoder of one that has no forward, or returns a loss.
        needs_inside = isinstance(inner, nn.Module) and re.search(r"NotImplemented| \(\)", str(said))
        if inner is not module and not needs_inside:
            continue
        idx = torch.randint(2, (TEXTS, T), generator=torch.Generator().manual_seed(0)).to(device_of(inner))
        calls = calls_of(call or inner, "call" if call else name)
        for note, ids, line in product(NOTES, (idx, idx[0]), calls):
            way = Decoder(inner, call or module, line + note, context_length=context, length=context or T)
            with evaluating(module), torch.no_grad():
                found = settle(way, ids, vocab_size)
            if isinstance(found, Decoder):
                return found
            said.setdefault(found, way if ids is idx else by_text(way))
    tried = "; ".join(f"{way} {what}" for what, way in [*said.items()][:3])
    raise UserError(f"no logits of all positions, (B, T, V), are found: {tried}; pass call=lambda ids: model(ids, ...)")


def calls_of(function: Callable, name: str) -> list[str]:
    """Return the ways to call a function, the simplest first, by the names of its arguments."""
    parameters = {}
    with suppress(TypeError, ValueError):  # of a scripted module
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    ids = "input_ids=ids" if "input_ids" in parameters else "ids"

    def write(names: Iterable[str]) -> str:
        given = [f"{key}={FILL.get(key, '...')}" for key in names]
        return f"{name}({', '.join([ids, *given])})"

    needed = [p.name for p in [*parameters.values()][1:] if p.default is p.empty and not str(p).startswith("*")]
    if not FILL.keys() >= {*needed}:
        raise UserError(f"{name} needs more than ids: pass call=lambda ids: {write(needed)}")
    targets, helpers = ([key for key in parameters if key in known] for known in (TARGETS, HELPERS))
    return [*dict.fromkeys(map(write, ([], targets, helpers, targets + helpers)))]


def by_text(way: Decoder) -> Decoder:
    """Return the way to call what reads one text, (T,), with several."""
    return replace(way, line=f"[{re.sub(IDS, 'text', way.line)} for text in ids]")


def settle(way: Decoder, ids: Tensor, vocab_size: int | None) -> Decoder | str:
    """Return a way with the place and the axes of the logits in what it returns; if there are none, what came back.

    Texts (T, B) are told by which logits a token moves: those of its column, and of no other, wherever that is.
    """
    found = []
    try:
        with Seen(ids) as seen:
            outputs = parts(way.evaluate(ids))
        tensors = {place: x for place, x in outputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        for (place, x), layout in product(tensors.items(), LAYOUTS):
            if x.dim() < 2:
                continue
            with suppress(RuntimeError):
                *shape, V = eval(f"x{layout}", {"x": x, "ids": ids}).shape
                if shape == [*ids.shape] and (V == vocab_size if vocab_size else 2 * V >= seen.rows):
                    line = f"{way.line}{place}{layout}"
                    found.append(replace(way, line=line, vocab_size=V, num_ids=min(V, seen.rows or V)))
        if not found:
            shapes = ", ".join(f"{place or 'a tensor'} {tuple(x.shape)}" for place, x in tensors.items())
            return f"returned {shapes or 'no tensor'}"
        way = min(found, key=lambda way: abs(way.vocab_size - (seen.rows or way.vocab_size)))
        if ids.dim() == 1:
            return by_text(way)
        changed = ids.clone()
        changed[0, 0] = 1 - ids[0, 0]
        moved = (way(changed) - way(ids)).abs().amax(-1)
        moved = moved > 1e-4 * moved.max()
        alike = way(ids[:, :1].expand_as(ids))
        if moved[1:, 0].any() and not moved[:, 1:].any() and torch.allclose(alike[:, 0], alike[:, -1]):
            return replace(way, line=f"{re.sub(IDS, 'ids.T', way.line)}.transpose(0, 1)")
        return way
    except Exception as error:  # of whichever kind: the model's own
        return f"raised {' '.join(f'{type(error).__name__}: {error}'.split()):.200}"


# What is asked of a model.


def check_causality(
    model: nn.Module | Callable,
    vocab_size: int | None = None,
    length: int | None = None,
    *,
    call: Callable | None = None,
    module: nn.Module | None = None,
    **options: object,
) -> Causality:
    """Check that no position of a model depends on a later token. The report has `ok`, `call`, and a readable `str`.

    Args:
        model: a module, or a function of ids, (B, T) int64, that returns its logits.
        vocab_size: V. None: found.
        length: tokens of a text. Kernels may differ by length: give that of the training. None: that of the model's
            config; of a large model, or where there is none, 64.
        call: a function of ids, if the model needs more, as lambda ids: model(ids, ...).
        module: the module that has the weights, if `model` is a function.
        options: mask, special, decode, strict and others: see `tril.causality.check_causality`.

    Raises UserError if the model cannot be called, or fails while it is probed.
    """
    if not isinstance(model, nn.Module | type) and callable(model):
        model, call = module or nn.Module(), call or model
    decoder = find_call(model, vocab_size, length, call)
    size = sum(weight.numel() for weight in decoder.module.parameters())
    T = length or (decoder.length if size * decoder.length <= LARGE else min(USUAL, decoder.length))
    options.setdefault("tokens", range(decoder.num_ids))
    for name in ("tokens", "special"):
        if (largest := max(map(int, options.get(name) or ()), default=0)) >= decoder.num_ids:
            raise UserError(f"{name} has the id {largest}, beyond the vocabulary of {decoder.num_ids}")
    is_compiled = hasattr(model, "_orig_mod") and not call
    forward = replace(decoder, function=model) if is_compiled else decoder  # which is probed itself
    options.setdefault("extreme", [decoder])
    with errors_as_user_error(f"{decoder} fails while {T} tokens are probed"):
        report = causality.check_causality(forward, decoder.vocab_size, T, module=decoder.module, **options)
    return replace(report, call=f"called as {decoder}")


def assert_causal(model: nn.Module | Callable, *arguments: object, **options: object) -> None:
    """Raise AssertionError, with the sentence, if a position depends on a later token; see `check_causality`."""
    report = check_causality(model, *arguments, **options)
    if not report.ok:
        raise AssertionError(f"{report}; {report.call}")


def open_by_transformers(name: str | Path) -> nn.Module:
    """Return the causal language model in a directory, or of the Hugging Face hub, as `transformers` opens it.

    No code of the model runs and no pickle is read. Raises UserError if it cannot be opened so.
    """
    with errors_as_user_error("a directory or a name on the hub is opened by transformers: pip install transformers"):
        import transformers  # not installed with this, and slow to import
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    directory = Path(name)
    with errors_as_user_error(f"{name} cannot be opened by transformers"):
        if directory.is_dir():
            for index in directory.glob("*.index.json"):  # names files, which would be opened wherever they are
                for file in json.loads(index.read_text())["weight_map"].values():
                    if Path(file).name != file:
                        raise UserError(f"{index} names a file elsewhere, {file!r:.60}")
        if (directory / "adapter_config.json").exists():  # names a model, which would be opened
            raise UserError(f"{directory} has an adapter_config.json: merge the adapter, and take the file out")
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            dtype="auto",
            use_safetensors=True,
            local_files_only=directory.is_dir(),
            trust_remote_code=False,
            output_loading_info=True,
        )
        with suppress(ValueError):  # attention may be written out there
            model.set_attn_implementation("sdpa")
    if found["missing_keys"]:
        raise UserError(f"{name} has no tensor {min(found['missing_keys'])}, which its config.json asks for")
    if unused := found["unexpected_keys"]:
        print(f"note: {name} has tensors that are not used, as {min(unused)!r:.60}", file=sys.stderr)
    return model.eval()
