"""Tokenizers by name, and their files, which Hugging Face tools read too.

    bytes       256 bytes, nothing to learn
    chars       the characters of the corpus
    bpe:4096    byte-pair encoding trained on the corpus, this many tokens in all
    gpt2, ...   any encoding that tiktoken knows; it downloads and caches the vocabulary on first use
    PATH        a tokenizer.json from elsewhere

The last id of bytes, chars and bpe is `<|endoftext|>`, which starts every document. Models from elsewhere have a
tokenizer.json of their own, by the name "model". Such a file is used unchanged (`Tokenizer` in data/encoding.py).
"""

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from data.encoding import (
    END_OF_TEXT,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    TiktokenTokenizer,
    Tokenizer,
    from_ranks,
    split_into_bytes,
    to_bytes,
)
from errors import UserError, errors_as_user_error
from files import expand, read_small

GENERATION_CONFIG = "generation_config.json"
# Where publishers say what ends a text, in the order in which it counts: file -> key. bos_token_id is there too.
END_KEYS = {
    "config.json": "eos_token_id",
    GENERATION_CONFIG: "eos_token_id",
    TOKENIZER_CONFIG: "eos_token",
    "special_tokens_map.json": "eos_token",
}
PART = 1 << 12  # characters that a bpe tokenizer is trained on together, at most
MOST_PARTS = 1 << 16  # of these
ANY_CHARACTER = r"[\s\S]"  # means the same to every regex engine
# GPT-4's way to cut text into words, without possessive quantifiers, which regex engines disagree about.
WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(name: str, texts: Iterable[str]) -> TiktokenTokenizer:
    """Make a tokenizer by its name. Of these, chars and bpe learn from the texts.

    Raises UserError for an unknown name.
    """
    if name == "bytes":
        return build("bytes", ANY_CHARACTER, [bytes([byte]) for byte in range(256)])
    if name == "chars":
        characters = {"\n"}
        for text in texts:
            characters.update(text)
        return build("chars", ANY_CHARACTER, [character.encode() for character in sorted(characters)])
    if name.startswith("bpe:"):
        return train_bpe(name, texts)
    problem = (
        f"{name!r} is not bytes, chars, bpe:SIZE, the path of a tokenizer.json, model (if there is a train.init_from) "
        "or what tiktoken knows and has in TIKTOKEN_CACHE_DIR or can download"
    )
    with errors_as_user_error(problem):
        known = tiktoken.get_encoding(name)
    return from_ranks(name, known._pat_str, known._mergeable_ranks, known._special_tokens)


def build(name: str, pattern: str, tokens: list[bytes]) -> TiktokenTokenizer:
    """Return a tokenizer of these tokens, whose ids count from 0, and of END_OF_TEXT as the last."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return from_ranks(name, pattern, ranks, {END_OF_TEXT: len(ranks)})


def train_bpe(name: str, texts: Iterable[str]) -> TiktokenTokenizer:
    """Train byte-pair encoding (Sennrich et al. 2016) over bytes. A small corpus may give fewer tokens than asked for.

    Raises UserError if the size in the name is not a number, or too small.
    """
    size = name.removeprefix("bpe:")
    if not size.isdecimal() or len(size) > 8 or int(size) < 257:
        raise UserError(f"a bpe tokenizer has 257 tokens or more, as in bpe:4096, got {name!r}")
    trainer = trainers.BpeTrainer(
        vocab_size=int(size) - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = split_into_bytes(WORDS)
    # Training takes quadratic time in the length of a word, and a line without a space is one word.
    parts = (text[start : start + PART] for text in texts for start in range(0, len(text), PART))
    learner.train_from_iterator(islice(parts, MOST_PARTS), trainer)
    vocabulary = learner.get_vocab()
    return build(name, WORDS, [to_bytes(token) for token in sorted(vocabulary, key=vocabulary.get)])


def find_tokenizer(name: str, model: Path | None) -> Tokenizer | None:
    """Load a tokenizer that exists. Return None for one that is to be made by its name. Raises as `load_tokenizer`.

    model: the directory of the tokenizer with the name "model".
    """
    if name == "model":
        return load_tokenizer(model) if model else None
    path = expand(name)
    return load_tokenizer(path) if path.is_file() else None


def load_tokenizer(place: Path) -> Tokenizer:
    """Load the tokenizer of a corpus or checkpoint, or a tokenizer.json, with the files of END_KEYS beside it.

    Raises UserError if there is no tokenizer.json, or for a file that cannot be read.
    """
    path = place if place.is_file() else place / TOKENIZER_JSON
    if not path.is_file():
        raise UserError(
            f"{place} has no tokenizer: there is no {TOKENIZER_JSON}. A vocab.json, vocab.txt, tokenizer.model, "
            'spiece.model or *.tiktoken becomes one by python -c "from transformers import AutoTokenizer as T; '
            "T.from_pretrained('DIRECTORY').save_pretrained('DIRECTORY')\""
        )
    content = read_small(path)
    files = {
        name: read_small(path.with_name(name))
        for name in (*END_KEYS, "chat_template.jinja")  # which is kept for other tools, and never run
        if path.with_name(name).is_file()
    }
    with errors_as_user_error(f"this version cannot read {' or '.join([str(path), *files])}"):
        described = {name: json.loads(files.get(name, "{}")) for name in END_KEYS}
        own_name = described[TOKENIZER_CONFIG].get("tril_name")
        library = tokenizers.Tokenizer.from_buffer(content)
        if own_name is not None:
            return TiktokenTokenizer(str(own_name), library, content)
        ends = []
        for name, key in END_KEYS.items():
            end = described[name].get(key)
            if isinstance(end, dict):  # some files wrap it
                end = end.get("content")
            ends += end if isinstance(end, list) else [end]
        tokenizer = Tokenizer(f"{path.name} of {path.resolve().parent.name}", library, ends)
    files.pop("config.json", None)  # is the model's
    # Kept with the tokenizer, this file alone says the start and all ends, in a corpus as in a checkpoint.
    start = described["config.json"].get("bos_token_id", next(reversed(tokenizer.document_start), None))
    generation = {"bos_token_id": start} | described[GENERATION_CONFIG] | {"eos_token_id": tokenizer.ends or None}
    files[GENERATION_CONFIG] = f"{json.dumps(generation, indent=2)}\n".encode()
    tokenizer.files = {TOKENIZER_JSON: content, **files}
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files of a tokenizer into a directory."""
    for name, content in tokenizer.files.items():
        (directory / name).write_bytes(content)
