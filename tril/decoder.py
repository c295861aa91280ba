"""Run any decoder: a module that takes token ids, (B, T), and returns logits, (B, T, V), or something that has them.

`find_call` finds how a model is called, by calling it:

    decoder = find_call(model)
    print(decoder)              model(ids, targets=ids)[0]
    decoder(idx)                (B, T) int64 -> logits (B, T, V)

Shapes: B texts, T time (tokens), V vocabulary, C channels.
"""

import inspect
import json
import math
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
# Names of numbers of tokens behind which a model may do otherwise, and the most that are read to get there.
WINDOWS = ("sliding_window", "chunk_size", "attention_chunk_size", "index_topk")
FAR = 1024
TEXTS = 3  # that are read to find the call: another number than that of their tokens
LENGTHS = (59, 64, 128, 31, 13, 7)  # tokens of these texts; the first is hardly ever the size of a vocabulary
USUAL = 64  # tokens that are probed where nothing says what a model can read
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


def logits_at(model: nn.Module, idx: Tensor, positions: slice | Tensor = slice(None)) -> Tensor:
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

    named = getattr(model, "get_output_embeddings", None)
    head = named() if named else getattr(model, "lm_head", None)
    if isinstance(head, nn.Linear):  # another may mix the positions
        with head.register_forward_pre_hook(cut), suppress(Exception):  # the model may need all logits, as for a loss
            logits = logits_of(model(idx))
            if was_cut:
                return logits
    with errors_as_user_error(f"the model cannot read {T} tokens"):
        logits = logits_of(model(idx))
    if logits.size(1) != T:
        raise UserError(f"expected logits of all {T} tokens, got those of {logits.size(1)}: let the model return all")
    return logits[:, positions]


# How a model is called.

FILL = {  # arguments of these names are passed so
    "input_ids": "ids",
    **dict.fromkeys(("targets", "target", "target_seq", "labels", "y"), "ids"),
    "attention_mask": "ones_like(ids)",
    **dict.fromkeys(("positions", "position_ids", "input_pos", "cache_position"), "arange(T).expand_as(ids)"),
}
MAKE = {
    "ids": lambda ids: ids,
    "ones_like(ids)": torch.ones_like,
    "arange(T).expand_as(ids)": lambda ids: torch.arange(ids.size(-1), device=ids.device).expand_as(ids),
}
LAYOUTS = {  # how an output becomes (*ids.shape, V)
    "": lambda x, ids: x,
    ".mT": lambda x, ids: x.transpose(-1, -2),
    ".transpose(0, 1)": lambda x, ids: x.transpose(0, 1),
    ".unflatten(0, ids.shape)": lambda x, ids: x.unflatten(0, ids.shape),
    "[0]": lambda x, ids: x[0],
}
PLAIN = re.compile(r".+\((input_ids=)?ids\)(\[0\]|\.logits|\['logits'\])?")  # calls whose logits `logits_of` finds
OF_LOSS = ", logits as its cross_entropy got them"


class Watcher(TorchFunctionMode):
    """Sees the logits that a cross-entropy is given, and the number of rows of an embedding that reads these ids."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids.flatten().sort().values
        self.logits = {}
        self.rows = 0

    def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        if function is F.embedding and torch.equal(args[0].flatten().sort().values, self.ids):
            self.rows = len(args[1])
        if function in (F.cross_entropy, F.nll_loss):
            self.logits[OF_LOSS] = args[0]
        return function(*args, **kwargs or {})


@dataclass(frozen=True)
class Decoder:
    """A model and how it is called: ids, (B, T) int64 -> logits, (B, T, V). `str` says how, in one line."""

    module: nn.Module
    """The module that has the weights, without what wraps it."""
    function: Callable
    """What is called: the module, or a function that calls it."""
    name: str
    """How that is written."""
    form: str = "ids"
    """What is given: ids (B, T); ids.T; or each text (T,) by itself."""
    passed: tuple[str, ...] = ()
    """Arguments that are passed by name: keys of FILL."""
    place: str = ""
    """Where the logits are in what is returned, as `leaves` names it."""
    layout: str = ""
    """How their axes are put in order: a key of LAYOUTS."""
    vocab_size: int = 0
    """V, the size of the logits."""
    num_ids: int = 0
    """How many ids there are: less than V, if the embedding has fewer rows."""
    context_length: int | None = None
    """The most tokens that the model can read, if its config says so."""
    length: int = USUAL
    """How many tokens the model can read, if its config says so; else a number that it did read."""

    def __str__(self) -> str:
        given = ["ids"] * ("input_ids" not in self.passed) + [f"{name}={FILL[name]}" for name in self.passed]
        layout = self.layout * (self.place != OF_LOSS) + ".transpose(0, 1)" * (self.form == "ids.T")
        text = re.sub(r"\bids\b", self.form, f"{self.name}({', '.join(given)}){self.place}{layout}")
        return f"[{text} for text in ids]" if self.form == "text" else text

    def __call__(self, idx: Tensor) -> Tensor:
        """Return the logits of all positions."""
        if self.form == "text":
            return torch.stack([self.logits(text) for text in idx])
        if self.form == "ids.T":
            return self.logits(idx.T.contiguous()).transpose(0, 1)
        return self.logits(idx)

    def as_module(self) -> nn.Module:
        """Return a module from ids to logits: the model itself, if it is called with ids alone and returns them."""
        is_plain = self.function is self.module and PLAIN.fullmatch(str(self))
        return self.module if is_plain else Called(self)

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits of what the model is given as it is, (*ids.shape, V)."""
        outputs = self.outputs(ids, Watcher(ids) if self.place == OF_LOSS else None)
        if self.place not in outputs:  # in training a model may return a loss beside them, or none
            return next(x for x in outputs.values() if x.shape == (*ids.shape, self.vocab_size))
        return LAYOUTS[self.layout](outputs[self.place], ids)

    def outputs(self, ids: Tensor, watcher: Watcher | None) -> dict[str, Tensor]:
        """Call the function, watched or not. Return each tensor of numbers in what it returns, by its place."""
        options = {name: MAKE[FILL[name]](ids) for name in self.passed}
        with watcher or nullcontext():
            output = self.function(*(() if "input_ids" in options else (ids,)), **options)
        return dict(leaves(output)) | (watcher.logits if watcher else {})


class Called(nn.Module):
    """A module from ids, (B, T), to logits, (B, T, V), by the way in which a model is called."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.module = decoder.module
        self.decoder = decoder

    def forward(self, idx: Tensor) -> Tensor:
        """Return the logits of all positions."""
        return self.decoder(idx)


def leaves(output: object, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of numbers in what a model returns, and its place in it; chunks and tokens also joined."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield place, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from leaves(value, f"{place}[{key!r}]")
    elif isinstance(output, list | tuple):
        for number, value in enumerate(output):
            yield from leaves(value, f"{place}[{number}]")
        with suppress(Exception):  # of whichever kind, by version of PyTorch
            yield f"{place}, joined", (torch.cat if output[0].dim() > 2 else torch.stack)(output, -2)
    elif place.count(".") < 2:
        for key, value in getattr(output, "__dict__", {}).items():
            yield from leaves(value, f"{place}.{key}")


def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and what it wraps, from without: DataParallel and its kind, averages of weights, compiled ones."""
    while isinstance(model, nn.Module):
        yield model
        of_torch = type(model).__module__.startswith(("torch.", "lightning"))
        model = of_torch and (getattr(model, "_orig_mod", None) or getattr(model, "module", None))


def config_numbers(names: Iterable[str], *models: object) -> Iterator[int]:
    """Yield the numbers of these names that models or their configs have."""
    for model in models:
        config = getattr(model, "config", getattr(model, "cfg", None))
        for owner in (config, getattr(config, "text_config", None), model):
            for name in names:
                found = owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
                if isinstance(found, int):
                    yield found


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
    answers = {}
    for name in ("model", "model.model", "model.net"):
        inner = getattr(module, name.partition(".")[2], None) if answers else module
        # Inside is the decoder of one that has no forward, or returns a loss.
        if (
            not isinstance(inner, nn.Module)
            or answers
            and not any("NotImplemented" in what or " ()" in what for what in answers)
        ):
            continue
        context = length or next(config_numbers(CONTEXTS, inner, module, *wrappers), None)
        for T in dict.fromkeys([min(LENGTHS[0], context), context]) if context else LENGTHS:
            idx = torch.randint(2, (TEXTS, T), generator=torch.Generator().manual_seed(0))
            for way in ways(Decoder(inner, call or inner, "call" if call else name)):
                with evaluating(module), torch.no_grad():
                    found = locate_logits(way, idx.to(device_of(inner)), vocab_size)
                if isinstance(found, Decoder):
                    read = USUAL if T == LENGTHS[0] else T
                    return replace(found, context_length=context, length=context or read)
                answers.setdefault(found, way)
            if any(what.startswith("returned") for what in answers):
                break
    tried = "; ".join(f"{way} {what}" for what, way in [*answers.items()][:3])
    raise UserError(f"no logits of all positions, (B, T, V), are found: {tried}; pass call=lambda ids: model(ids, ...)")


def ways(way: Decoder) -> Iterator[Decoder]:
    """Yield the ways to call a function, the simplest first, by the names of its arguments."""
    parameters = {}
    with suppress(TypeError, ValueError):  # of a scripted module
        parameters = inspect.signature(getattr(way.function, "forward", way.function)).parameters
    named = [p for p in [*parameters.values()][1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in named if p.default is p.empty]
    if not FILL.keys() >= {*needed}:
        passed = ", ".join(f"{name}={FILL.get(name, '...')}" for name in needed)
        raise UserError(f"{way.name} needs more than ids: pass call=lambda ids: {way.name}(ids, {passed})")
    needed = ["input_ids"] * ("input_ids" in parameters) + [name for name in needed if name != "input_ids"]
    known = [p.name for p in named if p.name in FILL and p.name not in needed]
    targets = [name for name in known if FILL[name] == "ids"]
    helpers = [name for name in known if name not in targets]
    helped = [[], *([name] for name in helpers), helpers]
    for form, helper, target in product(("ids", "text"), helped, [[], *([name] for name in targets)]):
        yield replace(way, form=form, passed=(*needed, *target, *helper))


def locate_logits(way: Decoder, idx: Tensor, vocab_size: int | None) -> Decoder | str:
    """Return a way with the place and the axes of the logits in what it returns; if there are none, what came back.

    Texts (T, B) are told by which logits a token moves: those of its column, and of no other, wherever that is.
    """
    ids = idx[0] if way.form == "text" else idx
    watcher = Watcher(ids)
    found = []
    try:
        outputs = way.outputs(ids, watcher)
        for (place, output), (layout, order) in product(outputs.items(), LAYOUTS.items()):
            with suppress(RuntimeError, IndexError, ValueError):
                *shape, V = order(output, ids).shape
                is_large = V == vocab_size if vocab_size else V > 1 and 2 * V >= watcher.rows
                if shape == [*ids.shape] and is_large and "hidden" not in place:
                    is_other = not place.strip("[]'").endswith("logits")
                    found.append((is_other, abs(V - (watcher.rows or V)), len(found), place, layout, V))
        if not found:
            shapes = ", ".join(f"{place or 'a tensor'} {tuple(output.shape)}" for place, output in outputs.items())
            return f"returned {shapes or 'no tensor'}"
        *_, place, layout, V = min(found)
        way = replace(way, place=place, layout=layout, vocab_size=V, num_ids=min(V, watcher.rows or V))
        if way.form == "ids" and idx.size(1) > 1:
            changed = idx.clone()
            changed[0, 0] = 1 - idx[0, 0]
            moved = (way(changed) - way(idx)).abs().amax(-1)
            moved = moved > 1e-4 * moved.max()
            alike = way(idx[:, :1].repeat(1, idx.size(1)))
            if moved[1:, 0].any() and not moved[:, 1:].any() and torch.allclose(alike[:, 0], alike[:, 1]):
                return replace(way, form="ids.T")
        return way
    except Exception as error:  # of whichever kind: the model's own
        return f"raised {' '.join(f'{type(error).__name__}: {error}'.split()):.200}"


# What is asked of a model.


def decode_by_transformers(model: nn.Module, idx: Tensor) -> Tensor:
    """Return the logits of a text, (B, T) -> (B, T, V), that a model of `transformers` reads with its own cache."""
    T = idx.size(1)
    sizes = [T // 2, 1, 2, T - T // 2 - 3]
    if model._is_stateful:  # some take several tokens for the first ones
        sizes = [T - 5] + [1] * 5
    logits = []
    cache = {}
    for part in idx.split(sizes, dim=1):
        output = model(input_ids=part, use_cache=True, **cache)
        [name] = output.keys() & inspect.signature(model.forward).parameters
        cache = {name: output[name]}
        logits.append(output["logits"])
    return torch.cat(logits, dim=1)


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
    if length is not None and length < 1:
        raise UserError(f"length must be a number of at least 1, got {length}")
    if not isinstance(model, nn.Module | type) and callable(model):
        model, call = module or nn.Module(), call or model
    decoder = find_call(model, vocab_size, length, call)
    size = sum(weight.numel() for weight in decoder.module.parameters())
    T = int(length or (decoder.length if size * decoder.length <= LARGE else min(USUAL, decoder.length)))
    window = max(config_numbers(WINDOWS, decoder.module), default=0)
    beyond = min(2 * window + 1, decoder.context_length or math.inf)
    if length is None and size * beyond <= LARGE and beyond <= FAR:
        T = max(T, beyond)
    options.setdefault("tokens", range(decoder.num_ids))
    for name in ("tokens", "special"):
        if options.get(name) is not None:
            options[name] = [*map(int, options[name])]
            if (largest := max(options[name], default=0)) >= decoder.num_ids:
                raise UserError(f"{name} must be ids from 0 to {decoder.num_ids - 1}, got {largest}")
    is_compiled = hasattr(model, "_orig_mod") and not call
    forward = replace(decoder, function=model) if is_compiled else decoder
    options.setdefault("extreme", [decoder])
    decode = partial(decode_by_transformers, decoder.function)
    with evaluating(decoder.module), torch.no_grad(), suppress(Exception):  # without a cache, or with a strange one
        idx = torch.zeros(2, T, dtype=int, device=device_of(decoder.module))
        logits_of(decode(idx), (2, T, decoder.vocab_size))
        options.setdefault("decode", decode)
    with errors_as_user_error(f"{decoder} fails while {T} tokens are probed"):
        ask = partial(causality.check_causality, forward, decoder.vocab_size, T, module=decoder.module)
        report = ask(**options)
        if options.get("decode") is decode:
            remark = report.finding or ""
            if "decoding" not in remark or options.get("strict"):
                remark = "decoding with its cache was asked for"
            else:
                report = ask(**options | {"decode": None})
            report.remarks.add(remark)
    if report.is_blind:
        report = replace(report, finding=f"{report.finding} (if that is meant, as of a window, pass mask=)")
    if T < beyond:
        report.remarks.add(f"what is {window} tokens away was not reached: ask for a length of {beyond}")
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
        raise UserError(
            f"{name} has no tensor {min(found['missing_keys'])}, which its config.json expects: fetch all files of it"
        )
    if unused := found["unexpected_keys"]:
        print(f"note: {name} has tensors that are not used, as {min(unused)!r:.60}", file=sys.stderr)
    return model.eval()
