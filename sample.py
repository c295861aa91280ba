"""Generate text from a checkpoint or a run directory.

Ways to ask:
    python sample.py out/quickstart --prompt "def"       continue a text
    python sample.py out/quickstart --prompt @story.txt  ... of a file
    python sample.py out/quickstart --num_samples 5      five of them
    python sample.py out/quickstart --temperature 0      the likeliest tokens

The text ends after max_new_tokens, at the end of a document, or before --stop.
"""

import codecs
import json
import secrets
import sys
from dataclasses import dataclass
from pathlib import Path

import tiktoken
import torch
import tyro
from tqdm import tqdm

from configs import parse, read_prompt, run_script, visible
from data import DataError
from data.tokenizer import encode, load_tokenizer, token_bytes
from model import GPT, ModelError
from model.checkpoint import find_checkpoint, read_certificate
from model.sampling import stream
from training.device import find_device


@dataclass(frozen=True)
class Options:
    __doc__ = __doc__

    checkpoint: tyro.conf.Positional[Path]
    """A checkpoint; a run directory, whose newest one is taken; or a model OWNER/NAME of the Hugging Face hub."""
    prompt: str = ""
    """Text to continue; @FILE reads a file, - standard input. Empty: the beginning of a document."""
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
    """How many texts to generate."""
    seed: int | None = None
    """The same seed gives the same text. None: another one each time."""
    stop: str | None = None
    """End a text before this string."""
    no_cache: tyro.conf.FlagCreatePairsOff[bool] = False
    """Recompute all keys and values for every token: slow, and the same text."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object a sample instead of text."""
    device: str = "auto"
    """auto (CUDA, else MPS, else CPU) or a device such as cuda:1."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, got {getattr(self, name)}")


class Text:
    """A text that grows token by token and knows where it ends."""

    def __init__(self, tokenizer: tiktoken.Encoding, stop: str | None):
        self.tokenizer, self.stop = tokenizer, stop or ""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may take several tokens
        self.text, self.num_shown, self.num_tokens, self.finish = "", 0, 0, "length"

    def add(self, token: int) -> None:
        """Append a token, unless the text has ended or ends with it."""
        if self.ended:
            return
        if token == self.tokenizer.eot_token:
            self.finish = "end of text"
            return
        self.num_tokens += 1
        searched = max(0, len(self.text) - len(self.stop))
        self.text += self.decoder.decode(token_bytes(self.tokenizer, token))
        if self.stop and (end := self.text.find(self.stop, searched)) >= 0:
            self.text, self.finish = self.text[:end], "stop"

    @property
    def ended(self) -> bool:
        return self.finish != "length"

    def unseen(self, is_last: bool) -> str:
        """What was not returned before; what may become the stop text is held back until that is known."""
        end = len(self.text) if is_last or self.ended else max(self.num_shown, len(self.text) - len(self.stop))
        start, self.num_shown = self.num_shown, end
        return self.text[start:end]


def show(text: str) -> None:
    """Print now, without commands to a terminal."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def main() -> None:
    options = parse(Options, sys.argv[1:])
    prompt = read_prompt(options.prompt)
    directory = find_checkpoint(options.checkpoint)
    device = find_device(options.device)
    model = GPT.from_pretrained(directory, device)
    tokenizer = load_tokenizer(directory)
    if tokenizer.n_vocab > model.config.vocab_size:
        raise DataError(f"the tokenizer has {tokenizer.n_vocab} tokens, the model {model.config.vocab_size}")

    start = tokenizer.start_of_text
    ids = [] if start is None else [start]
    ids = ids + encode(tokenizer, prompt).tolist() or [tokenizer.eot_token]
    T = model.config.context_length
    seed = secrets.randbits(32) if options.seed is None else options.seed
    tokens = stream(
        model,
        torch.tensor([ids] * options.num_samples, device=device),
        options.max_new_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        options.min_p,
        not options.no_cache,
        seed,
    )
    print(f"causal: {visible(read_certificate(directory))}", file=sys.stderr)
    if len(ids) > T:
        print(f"prompt has {len(ids)} tokens, context is {T}: using the last {T}", file=sys.stderr)

    texts = [Text(tokenizer, options.stop) for _ in range(options.num_samples)]
    streaming = options.num_samples == 1 and not options.json
    if streaming:
        show(prompt)
    for column in tqdm(tokens, total=options.max_new_tokens, unit="token", leave=False, disable=streaming or None):
        for text, token in zip(texts, column[:, 0].tolist(), strict=True):
            text.add(token)
        if streaming:
            show(texts[0].unseen(is_last=False))
        if all(text.ended for text in texts):
            break
    for number, text in enumerate(texts):
        if options.json:
            record = {"sample": number, "seed": seed, "prompt": prompt, "text": text.text}
            print(json.dumps(record | {"tokens": text.num_tokens, "finish": text.finish}))
        elif streaming:
            show(text.unseen(is_last=True) + "\n")
        else:
            show(f"--- sample {number + 1} of {len(texts)}\n{prompt}{text.text}\n")


if __name__ == "__main__":
    run_script(main)
