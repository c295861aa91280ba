#!/usr/bin/env python3
"""Generate text from a checkpoint or a run directory.

Ways to ask:
    python sample.py out/quickstart --prompt "def"       continue a text
    python sample.py out/quickstart --prompt @story.txt  ... of a file
    python sample.py out/quickstart --prompt "def" "if"  several at once
    python sample.py out/quickstart --num_samples 5      five texts each
    python sample.py out/quickstart --temperature 0      the likeliest tokens

The text ends after max_new_tokens, at the end of a document, or before --stop.
"""

import json
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

from configs import parse, read_prompt, run_script, visible
from data import DataError
from data.tokenizer import Tokenizer, load_tokenizer
from model import ModelError
from model.checkpoint import find_checkpoint, read_certificate
from model.load import load_config, read_model
from model.precision import keep_matrices_in_bfloat16, precision
from model.sampling import stream
from training.device import advice_if_not_compiled, find_device, weights_dtype

READ_AT_ONCE = 16  # tokens, from a GPU


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint; a run directory, whose newest one is taken; or a model OWNER/NAME of the Hugging Face hub."""
    prompt: tuple[str, ...] = ("",)
    """Texts to continue; @FILE reads a file, - standard input. Empty: the beginning of a document."""
    max_new_tokens: int = 256
    """The most tokens to generate; may be more than the context length."""
    temperature: float = 0.8
    """Below 1 more careful, above 1 more daring; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among the k likeliest tokens only."""
    top_p: float | None = None
    """Choose among the fewest likeliest tokens that have this probability together."""
    min_p: float | None = None
    """Forbid tokens less than this times as likely as the likeliest."""
    num_samples: int = 1
    """How many texts to generate for each prompt."""
    seed: int | None = None
    """The same seed gives the same texts for the same prompts and num_samples. None: others each time."""
    stop: str | None = None
    """End a text before this string; $'\\n' is the end of a line, to bash."""
    no_cache: tyro.conf.FlagCreatePairsOff[bool] = False
    """Recompute all keys and values for every token: slow, and the same text, but for rounding in bfloat16."""
    compile: tyro.conf.FlagCreatePairsOff[bool] = False
    """Compile the step from token to token: begins later, and is fast then. For long texts on a GPU."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object a sample instead of text."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a device such as cuda:1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights. auto: bfloat16 where that is faster, else float32."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.prompt:
            raise ModelError("--prompt must be followed by a text")


class Text:
    """A text that grows token by token and knows where it ends."""

    def __init__(self, tokenizer: Tokenizer, stop: str | None, prompt: Sequence[int] = ()):
        self.tokenizer, self.stop, self.stream = tokenizer, stop or "", tokenizer.stream(prompt)
        self.text, self.num_shown, self.num_tokens, self.finish = "", 0, 0, "length"

    def add(self, token: int) -> None:
        """Append a token, unless the text has ended or ends with it."""
        if self.ended:
            return
        if token == self.tokenizer.end_of_text:
            self.finish = "end of text"
            return
        self.num_tokens += 1
        searched = max(0, len(self.text) - len(self.stop))
        self.text += self.stream.add(token)
        if self.stop and (end := self.text.find(self.stop, searched)) >= 0:
            self.text, self.finish = self.text[:end], "stop"

    def close(self) -> None:
        """Append what is left of the last token, when no more will come."""
        if self.finish != "stop":
            self.text += self.stream.end()

    @property
    def ended(self) -> bool:
        return self.finish != "length"

    def unseen(self, is_last: bool) -> str:
        """What was not returned before; what may become the stop text is held back until that is known."""
        end = len(self.text) if is_last or self.ended else max(self.num_shown, len(self.text) - len(self.stop))
        start, self.num_shown = self.num_shown, end
        return self.text[start:end]


def read_late(tokens: Iterator[Tensor], at_once: int) -> Iterator[list[int]]:
    """The (B, 1) tensors as numbers. A GPU is waited for once in `at_once` tokens, and works ahead until then."""
    while columns := list(islice(tokens, at_once)):
        yield from torch.cat(columns, dim=1).T.tolist()


def show(text: str) -> None:
    """Print now, without commands to a terminal."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


@advice_if_not_compiled("without --compile")
def main() -> None:
    options = parse(Options, sys.argv[1:])
    prompts = [read_prompt(prompt) for prompt in options.prompt]
    directory = find_checkpoint(options.checkpoint)
    device = find_device(options.device)
    config, num_texts = load_config(directory), len(prompts) * options.num_samples
    dtype = weights_dtype(options.dtype, device, config, config.context_length if options.no_cache else num_texts)
    model = read_model(directory, device, dtype)
    if dtype == torch.bfloat16 and device.type == "cpu" and precision(device) == torch.float32:
        keep_matrices_in_bfloat16(model)
    tokenizer = load_tokenizer(directory)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise DataError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.config.vocab_size}")

    start = tokenizer.start_of_text
    first = [] if start is None else [start]
    ids = [first + tokenizer.encode(prompt).tolist() or tokenizer.document_start for prompt in prompts]
    if [] in ids:
        raise DataError("this model's tokenizer has no token that begins a text: give a --prompt")
    numbers = [number for number in range(len(prompts)) for _ in range(options.num_samples)]  # of each text's prompt
    T = model.config.context_length
    seed = secrets.randbits(32) if options.seed is None else options.seed
    tokens = stream(
        model,
        [torch.tensor(ids[number], device=device) for number in numbers],
        options.max_new_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        not options.no_cache,
        seed,
        options.compile,
    )
    print(f"causal: {visible(read_certificate(directory))}", file=sys.stderr)
    print(f"device: {device}, weights in {str(dtype).removeprefix('torch.')}", file=sys.stderr)
    if options.compile:
        print("compiling: the first token may take a minute", file=sys.stderr)
    for number, prompt_ids in enumerate(ids):
        if len(prompt_ids) > T:
            which = f"prompt {number + 1}" if len(ids) > 1 else "prompt"
            print(f"{which} has {len(prompt_ids)} tokens, context is {T}: using the last {T}", file=sys.stderr)

    texts = [Text(tokenizer, options.stop, ids[number]) for number in numbers]
    streaming = len(texts) == 1 and not options.json
    if streaming:
        show(prompts[0])
    columns = read_late(tokens, READ_AT_ONCE if device.type == "cuda" else 1)
    for column in tqdm(columns, total=options.max_new_tokens, unit="token", leave=False, disable=streaming or None):
        for text, token in zip(texts, column, strict=True):
            text.add(token)
        if streaming:
            show(texts[0].unseen(is_last=False))
        if all(text.ended for text in texts):
            break
    for text in texts:
        text.close()
    if streaming:
        show(texts[0].unseen(is_last=True) + "\n")
        return
    for index, (number, text) in enumerate(zip(numbers, texts, strict=True)):
        sample, prompt = index % options.num_samples, prompts[number]
        if options.json:
            record = {"prompt_number": number, "sample": sample, "seed": seed, "prompt": prompt, "text": text.text}
            print(json.dumps(record | {"tokens": text.num_tokens, "finish": text.finish}))
        else:
            which = f"prompt {number + 1} of {len(prompts)}, " if len(prompts) > 1 else ""
            show(f"--- {which}sample {sample + 1} of {options.num_samples}\n{prompt}{text.text}\n")


if __name__ == "__main__":
    run_script(main)
