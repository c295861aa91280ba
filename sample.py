#!/usr/bin/env python3
"""Generate text from a checkpoint or a run directory.

Ways to start:
    python sample.py out/quickstart --prompt "def"       continue a text
    python sample.py out/quickstart --prompt @story.txt  ... read from a file
    python sample.py out/quickstart --num_samples 3      several texts

The options that people need first:
    --prompt          the text to continue
    --max_new_tokens  how many tokens at most
    --temperature     lower is more predictable
    --num_samples     how many texts
    --stop            end before this text

The generation_config.json of a model replaces the defaults, and a line says so.
"""

import cores  # noqa: F401  before torch
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro
from tqdm import tqdm

from cli.options import names_in, parse
from cli.script import printable, read_prompt, run_script
from data.encoding import REPLACEMENT
from data.tokenizer import GENERATION_CONFIG, Tokenizer, load_tokenizer
from errors import check_numbers, errors_as_user_error
from model import GPT
from model.checkpoint import find_checkpoint
from model.device import dtype_name, find_device, keep_freed_memory, weights_dtype
from model.load import load_model
from model.packed import packed
from model.sampling import Sampler, stream

GROWING = f"{REPLACEMENT}\u200c\u200d"  # last characters whose look depends on the next
CONTEXT = 64  # characters of the prompt, or tokens before the last ones, that are decoded with the text


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    checkpoint: tyro.conf.Positional[str]
    """A checkpoint, a run (its newest checkpoint), a Hugging Face model directory, or OWNER/NAME or hf:OWNER/NAME on
    the Hugging Face hub."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; may be repeated. @FILE reads a file, - standard input, @@ is an @. Left out or empty: a
    new document. Names of special tokens are ordinary text."""
    max_new_tokens: int = 256
    """The most tokens to generate; may be more than the context length."""
    sampler: Annotated[Sampler, tyro.conf.arg(name="")] = Sampler(0.8)
    num_samples: int = 1
    """Number of texts to generate for each prompt."""
    seed: int | None = None
    """The same seed gives the same texts for the same prompt and num_samples. None: different texts each time."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End a text before this string, or the first of several; $'\\n' is the end of a line in bash."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object per sample instead of text."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a device such as cuda:1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights. auto: bfloat16 if the machine computes it natively, else float32. A CPU needs as much
    memory for both: it keeps bfloat16 weights a second time, in the order in which it reads them fastest."""

    def __post_init__(self) -> None:
        check_numbers(self, num_samples=(1, 10**6))


class Text:
    """Text that grows token by token until it ends; `finish` says why it ended, and is empty before.

    The last tokens are decoded together, each time, since the text of one depends on its neighbours: a character may
    take several, and some tokenizers drop the space in front of the first word.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], prompt: str):
        self.tokenizer = tokenizer
        self.stops = [*filter(None, stops)]
        self.last = tokenizer.encode(prompt[-CONTEXT:]).tolist()
        self.start = len(tokenizer.decode(self.last))  # of the text that is not in `before`
        self.before = ""
        self.text = ""  # up to the stop text
        self.num_tokens = 0
        self.num_taken = 0
        self.finish = ""

    def add(self, token: int) -> None:
        """Append a token, unless the text has ended already or ends here."""
        if self.finish:
            return
        if token in self.tokenizer.ends:
            self.finish = "end of text"
            return
        self.num_tokens += 1
        self.last.append(token)
        text = self.before + self.tokenizer.decode(self.last)[self.start :]
        ends = [text.index(stop) for stop in self.stops if stop in text]
        self.text = text[: min(ends, default=None)]
        if ends:
            self.finish = "stop"
        if len(self.last) > 2 * CONTEXT:
            context = self.tokenizer.decode(self.last[-CONTEXT:])
            if REPLACEMENT not in context:  # it begins and ends with a whole character
                self.last = self.last[-CONTEXT:]
                self.start = len(context)
                self.before = text

    def take(self) -> str:
        """Return the text that is certain and was not taken before.

        While it grows, no last character that may be incomplete is certain, and no text with which the stop text may
        begin. What was taken stays, even where a decoder replaces a whole run of bytes since one of them is broken.
        """
        held = max(map(len, self.stops), default=0)
        end = len(self.text) if self.finish else max(0, len(self.text.rstrip(GROWING)) - held)
        new = self.text[self.num_taken : end]
        self.num_taken += len(new)
        return new


def show(text: str) -> None:
    """Print at once. On a terminal, control characters are made visible and have no effect."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def main() -> None:
    argv = sys.argv[1:]
    options = parse(Options, argv)
    prompts = [*map(read_prompt, options.prompt or [""])]
    checkpoint = find_checkpoint(options.checkpoint)
    device = find_device(options.device)
    dtype = weights_dtype(options.dtype, device)
    keep_freed_memory(device)
    model = load_model(checkpoint, device, dtype)
    tokenizer = load_tokenizer(checkpoint.directory)
    tokenizer.check_fits(model.config.vocab_size)
    published = json.loads(tokenizer.files.get(GENERATION_CONFIG, "{}"))
    if published.get("do_sample") is False:
        published = {"temperature": 0}
    free = vars(options.sampler).keys() - names_in(argv)
    with errors_as_user_error(f"{GENERATION_CONFIG} must have numbers for {', '.join(sorted(free))}: give your own"):
        words = [f"--{name}={value:.15g}" for name, value in published.items() if name in free and value is not None]
    if words:
        print(f"from {GENERATION_CONFIG}: {' '.join(words)}", file=sys.stderr)
        options = parse(Options, words + argv)

    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"device: {device}, weights in {dtype_name(dtype)}", file=sys.stderr)
    with packed(model):
        for prompt in prompts:
            sample(model, tokenizer, prompt, seed, options)


def sample(model: GPT, tokenizer: Tokenizer, prompt: str, seed: int, options: Options) -> None:
    """Continue a prompt, and print the texts."""
    if names := [name for name in tokenizer.special_tokens if name in prompt]:
        print(f"note: {', '.join(names)} in the prompt is ordinary text", file=sys.stderr)
    if "\\" in "".join(options.stop):
        print(r"note: a \ in --stop is ordinary text; $'\n' is the end of a line in bash", file=sys.stderr)
    ids = tokenizer.start_of_text + tokenizer.encode(prompt).tolist() or tokenizer.document_start
    T = model.config.context_length
    if len(ids) > T:
        print(f"the prompt has {len(ids)} tokens, context is {T}: using the last {T}", file=sys.stderr)
    texts = [Text(tokenizer, options.stop, prompt) for _ in range(options.num_samples)]
    idx = torch.tensor([ids] * len(texts), device=model.device)
    tokens = stream(model, idx, options.max_new_tokens, options.sampler, seed)

    grows = options.num_samples == 1 and not options.json  # is printed while it grows
    if grows:
        show(prompt)
    for column in tqdm(tokens, total=options.max_new_tokens, unit="token", leave=False, disable=grows or None):
        for text, token in zip(texts, column.flatten().tolist(), strict=True):
            text.add(token)
        if grows:
            show(texts[0].take())
        if all(text.finish for text in texts):
            break
    for number, text in enumerate(texts):
        text.finish = text.finish or "length"
        if not text.text:
            print(f"note: nothing is added to the prompt: {text.finish} at once", file=sys.stderr)
        if grows:
            show(text.take() + "\n")
        elif options.json:
            record = {
                "sample": number,
                "seed": seed,
                "prompt": prompt,
                "text": text.text,
                "tokens": text.num_tokens,
                "finish": text.finish,
            }
            print(json.dumps(record))
        else:
            show(f"--- sample {number + 1} of {options.num_samples}\n{prompt}{text.text}\n")


if __name__ == "__main__":
    run_script(main)
