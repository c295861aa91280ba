"""Run any decoder: a module that takes token ids, (B, T), and returns logits, (B, T, V), or something that has them.

`find_call` finds how a model is called, by calling it:

    decoder = find_call(model)
    print(decoder)              model(ids, targets=ids)[0]
    decoder(idx)                (B, T) int64 -> logits (B, T, V)

Shapes: B texts, T time (tokens), V vocabulary, C channels.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tril import causality
from tril.causality import Causality, logits_of
from tril.errors import UserError, errors_as_user_error

POSITIONS = 1024  # logits are computed for so many positions of a sequence at a time: V numbers each
# Names of the number of tokens that a model can read.
CONTEXTS = (
    "context_length max_position_embeddings block_size n_positions n_ctx seq_len sequence_len max_seq_len".split()
)
TEXTS = 3  # that are read to find the call: another number than that of their tokens
LENGTHS = (59, 64, 128, 31, 13, 7)  # tokens of these texts; the first is hardly ever the size of a vocabulary
USUAL = 64  # tokens that are probed where nothing says what a model can read
LARGE = 4e9  # weights times tokens: a larger model is probed in as many tokens as that
INNER = ("model", "net", "module")  # where a module that returns a loss has the decoder


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


def read(model: "nn.Module | Decoder", idx: Tensor, positions: slice | Tensor = slice(None)) -> Tensor:
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

FILL = {  # arguments beside the ids, as they are written, and made from the ids
    **dict.fromkeys(("targets", "target", "target_seq", "labels", "y"), ("{}", lambda ids: ids)),
    "attention_mask": ("ones_like({})", torch.ones_like),
    **dict.fromkeys(
        ("positions", "position_ids"),
        ("arange(T).expand_as({})", lambda ids: torch.arange(ids.size(-1), device=ids.device).expand_as(ids)),
    ),
    **dict.fromkeys(
        ("input_pos", "cache_position"), ("arange(T)", lambda ids: torch.arange(ids.size(-1), device=ids.device))
    ),
}
FORMS = {  # what the model is given in turn, from (B, T), and (B, T, V) from what it returned
    "ids": (lambda idx: [idx], lambda parts: parts[0]),
    "ids.T": (lambda idx: [idx.T.contiguous()], lambda parts: parts[0].transpose(0, 1)),
    "text": (lambda idx: [*idx], torch.stack),
    "text[None]": (lambda idx: idx.split(1), torch.cat),
}
LAYOUTS = {  # how (*given.shape, V) is made of an output
    "": lambda x, given: x,
    ".mT": lambda x, given: x.transpose(-1, -2),
    ".transpose(0, 1)": lambda x, given: x.transpose(0, 1),
    ".unflatten(0, ids.shape)": lambda x, given: x.unflatten(0, given.shape),
    "[0]": lambda x, given: x[0],
}
PLAIN = ("", "[0]", ".logits", "['logits']")  # places of logits where `logits_of` finds them
OF_LOSS = ", logits as its cross_entropy got them"


class Seen(TorchFunctionMode):
    """Sees the logits that cross-entropies are given, and the sizes of embeddings that read these ids."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids.flatten().sort().values
        self.logits = {}
        self.rows = []

    def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None):
        if function is F.embedding and torch.equal(args[0].flatten().sort().values, self.ids):
            self.rows.append(len(args[1]))
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
    keyword: bool
    """Whether the ids are passed as `input_ids`."""
    form: str = "ids"
    """How the ids are given: a key of FORMS."""
    filled: tuple[str, ...] = ()
    """What else is passed: keys of FILL."""
    place: str = ""
    """Where the logits are in what is returned, as `leaves` names it."""
    layout: str = ""
    """How their axes are put in order: a key of LAYOUTS."""
    vocab_size: int = 0
    """V, the size of the logits."""
    num_ids: int = 0
    """How many ids there are: less than V, if the embedding has no more rows."""
    context_length: int | None = None
    """The most tokens that the model can read, if it says so."""
    length: int = USUAL
    """The number of tokens that the model can read, if it says so; else one that it did read."""

    def __str__(self) -> str:
        first = f"input_ids={self.form}" if self.keyword else self.form
        called = ", ".join([first, *(f"{name}={FILL[name][0].format(self.form)}" for name in self.filled)])
        layout = "" if self.place == OF_LOSS else self.layout.replace("ids", self.form)
        text = f"{self.name}({called}){self.place}{layout}"
        if self.form.startswith("text"):
            return f"[{text} for text in ids]"
        return text + ".transpose(0, 1)" * (self.form == "ids.T")

    def __call__(self, idx: Tensor) -> Tensor:
        """Return the logits of all positions."""
        split, join = FORMS[self.form]
        order = LAYOUTS[self.layout]
        texts = split(idx.to(device_of(self.module)))
        return join([order(self.outputs(given)[0][self.place], given) for given in texts])

    def as_module(self) -> nn.Module:
        """Return a module from ids to logits: the model itself, if it is called with ids alone and returns them."""
        is_plain = self.function is self.module and str(self).removeprefix(f"{self.name}(ids)") in PLAIN
        return self.module if is_plain else Called(self)

    def outputs(self, given: Tensor, watch: bool = False) -> tuple[dict[str, Tensor], list[int]]:
        """Call the function. Return all tensors by their places, and the rows of the embeddings of ids, if watched."""
        options = {name: FILL[name][1](given) for name in self.filled}
        seen = Seen(given)
        with seen if watch or self.place == OF_LOSS else nullcontext():
            output = self.function(input_ids=given, **options) if self.keyword else self.function(given, **options)
        return dict(leaves(output)) | seen.logits, seen.rows


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
    """Yield each tensor of numbers in what a model returns, and its place in it; chunks of logits also joined."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield place, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from leaves(value, f"{place}[{key!r}]")
    elif isinstance(output, list | tuple):
        for number, value in enumerate(output):
            yield from leaves(value, f"{place}[{number}]")
        with suppress(RuntimeError, TypeError):
            yield f"{place}, joined", torch.cat(output, -2)
    elif place.count(".") < 2:
        for key, value in getattr(output, "__dict__", {}).items():
            yield from leaves(value, f"{place}.{key}")


def unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and what it wraps, from without: DataParallel and its kind, averages of weights, compiled ones."""
    while isinstance(model, nn.Module):
        yield model
        of_torch = type(model).__module__.startswith(("torch.", "lightning"))
        model = of_torch and (getattr(model, "_orig_mod", None) or getattr(model, "module", None))


def context_of(*models: object) -> int | None:
    """Return how many tokens a model can read, if it, its config, or one that wraps it has a name of CONTEXTS."""
    for model in models:
        config = getattr(model, "config", getattr(model, "cfg", None))
        for owner in (config, getattr(config, "text_config", None), model):
            values = owner if isinstance(owner, Mapping) else {name: getattr(owner, name, None) for name in CONTEXTS}
            for name in CONTEXTS:
                if isinstance(values.get(name), int):
                    return values[name]


def find_call(
    model: nn.Module, vocab_size: int | None = None, length: int | None = None, call: Callable | None = None
) -> Decoder:
    """Find how a model is called, and where the logits of all positions, (B, T, V), are in what it returns.

    The ids are given as (B, T); as (T, B), if texts influence each other in that way alone; as (T,) or (1, T), if
    several cannot be read. Where these are not enough, targets, a mask of ones and positions are passed, by the names
    that `forward` has. vocab_size, length: V and the most tokens, if they are known. call: a function of ids, to be
    called in place of the model.

    Raises UserError, which says what was tried and what came back, if no logits are found.
    """
    if isinstance(model, type):
        raise UserError(f"{model.__name__} is a class: give a model that it makes, {model.__name__}(...)")
    wrappers = [*unwrapped(model)]
    if not wrappers:
        raise UserError(f"expected a model, an nn.Module, got {type(model).__name__}")
    module = wrappers[-1]
    if device_of(module).type == "meta":
        raise UserError("the model is on the meta device, where it has no weights: put it on another, and load them")
    tried = {}
    for name in ["call"] if call else ["model", *(f"model.{name}" for name in INNER)]:
        inner = getattr(module, name.removeprefix("model."), None) if "." in name else module
        if not isinstance(inner, nn.Module):
            continue
        context = length or context_of(inner, *wrappers[::-1])
        lengths = dict.fromkeys([min(LENGTHS[0], context), context]) if context else LENGTHS
        with evaluating(module), torch.no_grad():
            for T in lengths:
                came = {}
                found = None
                for way in ways(inner, call or inner, name):
                    idx = torch.randint(2, (TEXTS, T), generator=torch.Generator().manual_seed(0))
                    idx[0, :2] = torch.arange(2)[:T]
                    settled, is_sure = settle(way, idx, vocab_size, came)
                    found = settled if is_sure else found or settled
                    if is_sure:
                        break
                if found:
                    read = max(T, USUAL if T == LENGTHS[0] else T)
                    return replace(found, context_length=context, length=context or read)
                tried = tried or came
                if not all(isinstance(result, Exception) for result in came.values()):
                    break
        # A loss alone, or no forward: the decoder may be inside.
        if not any(
            isinstance(result, NotImplementedError) or isinstance(result, dict) and () in result.values()
            for result in came.values()
        ):
            break
    raise UserError(explain(tried))


def ways(module: nn.Module, function: Callable, name: str) -> Iterator[Decoder]:
    """Yield the ways to call a module, the simplest first, or a function in its place, by its ids alone."""
    parameters = {}
    with suppress(TypeError, ValueError):  # of a scripted module
        parameters = inspect.signature(getattr(function, "forward", function)).parameters
    ids, *others = parameters.values() or [None]
    keyword = "input_ids" in parameters and (ids.name != "input_ids" or ids.kind == ids.KEYWORD_ONLY)
    needed = tuple(
        p.name for p in others if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )
    if not FILL.keys() >= {*needed}:
        passed = ", ".join(f"{other}={FILL[other][0].format('ids') if other in FILL else '...'}" for other in needed)
        raise UserError(f"{name} needs more than ids: pass call=lambda ids: {name}(ids, {passed})")
    known = [other for other in parameters if other in FILL and other not in needed]
    targets = [(), *((other,) for other in known if FILL[other][0] == "{}")]
    helpers = [(other,) for other in known if FILL[other][0] != "{}"]
    for form, helper, target in product(("ids", "text", "text[None]"), [(), *helpers, sum(helpers, ())], targets):
        yield Decoder(module, function, name, keyword, form, needed + target + helper)


def settle(way: Decoder, idx: Tensor, vocab_size: int | None, came: dict[str, object]) -> tuple[Decoder | None, bool]:
    """Return a way with the place and the axes of the logits in what it returns, and whether they are of each id.

    If there are none, add what there is to `came`. Texts (T, B) are told by which of the ids move which logits: those
    of a row, and of no other column.
    """
    idx = idx.to(device_of(way.module))
    given = FORMS[way.form][0](idx)[0]
    try:
        outputs, rows = way.outputs(given, watch=True)
        found = []
        for (place, output), (layout, order) in product(outputs.items(), LAYOUTS.items()):
            with suppress(RuntimeError, IndexError):
                logits = order(output, given)
                V = logits.size(-1)
                fits = V == vocab_size if vocab_size else V > 1 and 2 * V >= max(rows, default=0)
                if logits.shape[:-1] == given.shape and fits:
                    found.append(
                        (
                            not place.strip("[]'").endswith("logits"),
                            abs(V - max(rows, default=V)),
                            len(found),
                            place,
                            layout,
                            V,
                        )
                    )
        if not found:
            came[str(way)] = {place: tuple(output.shape) for place, output in outputs.items()}
            return None, False
        *_, place, layout, V = min(found)
        is_sure = V in (vocab_size, *rows) or not rows
        way = replace(way, place=place, layout=layout, vocab_size=V, num_ids=min(V, *rows, V))
        before = way(idx)
        if way.form == "ids" and idx.size(1) > 1:
            changed = idx.clone()
            changed[0, 0] = 1
            moved = (way(changed) - before).abs().amax(-1)
            moved = moved > 1e-4 * moved.max()
            alike = way(idx[:, :1].expand_as(idx).contiguous())
            if moved[1:, 0].any() and not moved[:, 1:].any() and torch.allclose(alike[:, 0], alike[:, 1]):
                way = replace(way, form="ids.T")
        return way, is_sure
    except Exception as error:  # of whichever kind: the model's own
        came[str(way)] = error
        return None, False


def explain(tried: dict[str, object]) -> str:
    """Return a sentence that says what was called, what came back, and what to write."""
    returned = {text: result for text, result in tried.items() if isinstance(result, dict) and text[0] != "["}
    said = {}
    for text, result in (returned or tried).items():
        if isinstance(result, dict):
            parts = [f"{place or 'a tensor'} {shape}" for place, shape in result.items()]
            what = f"returned {', '.join(parts[:6]) or 'no tensors'}"
        else:
            what = f"raised {' '.join(f'{type(result).__name__}: {result}'.split()):.200}"
        said.setdefault(what, text)
    what = "; ".join(f"{text} {what}" for what, text in [*said.items()][:3])
    return f"no logits of all positions, (B, T, V), are found: {what}; pass call=lambda ids: model(ids, ...)"


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
    is_compiled = decoder.function is not model and hasattr(model, "_orig_mod")
    forward = replace(decoder, function=model) if is_compiled and not call else decoder
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
    return model.eval()
