"""Tokenizers: each is a `tiktoken.Encoding`, kept on disk in the files that Hugging Face tools read.

    bytes       256 bytes, nothing to learn
    chars       the characters of the corpus
    bpe:4096    byte-pair encoding trained on the corpus, this many tokens in all
    gpt2, ...   any encoding tiktoken knows; it downloads and caches the vocabulary on first use

The last id of bytes, chars and bpe is `<|endoftext|>`, which starts every document. A model of the Hugging Face hub may
have another kind, a `HubTokenizer`: what differs between the two is known in this file only.
"""

import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data import DataError
from data.hub_tokenizer import BYTES, END_OF_TEXT, MOST_TOKENS, SAMPLE, SPELLING, HubTokenizer, to_bytes

Tokenizer = tiktoken.Encoding | HubTokenizer

MOST_JSON = 1 << 26  # bytes
FILES = ("tokenizer.json", "tokenizer_config.json")
ANY_CHARACTER = r"[\s\S]"  # means the same to every regex engine
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-4's way to cut text into words, without possessive quantifiers, which regex engines disagree about.
WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(name: str, texts: Iterable[str]) -> tiktoken.Encoding:
    """Build a tokenizer by name; chars and bpe read the texts. Raises DataError for a name that is none."""
    if name == "bytes":
        return build("bytes", ANY_CHARACTER, [bytes([byte]) for byte in range(256)])
    if name == "chars":
        characters = {"\n"}
        for text in texts:
            characters.update(text)
        return build("chars", ANY_CHARACTER, [character.encode() for character in sorted(characters)])
    if name.startswith("bpe:"):
        return train_bpe(name, texts)
    if name not in tiktoken.list_encoding_names():
        known = ", ".join(tiktoken.list_encoding_names())
        raise DataError(f"unknown tokenizer {name!r}: expected bytes, chars, bpe:SIZE or one of {known}")
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:
        raise DataError(
            f"tiktoken could not download the vocabulary of {name!r} ({type(error).__name__}): "
            "go online once, set TIKTOKEN_CACHE_DIR, or use bytes, chars or bpe:SIZE"
        ) from error


def build(name: str, pattern: str, tokens: list[bytes]) -> tiktoken.Encoding:
    """The encoding with these tokens, in order of their ids, and END_OF_TEXT behind them."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})


def train_bpe(name: str, texts: Iterable[str]) -> tiktoken.Encoding:
    """Byte-pair encoding (Sennrich et al. 2016) over bytes; a small corpus may yield fewer tokens than asked for."""
    size = name.removeprefix("bpe:")
    if not size.isdecimal() or int(size) < 257:
        raise DataError(f"a bpe tokenizer has 257 tokens or more, as in bpe:4096, got {name!r}")
    trainer = trainers.BpeTrainer(
        vocab_size=int(size) - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = split_into_bytes(WORDS)
    # Learning takes quadratic time in the length of a word, so a line without a space must not be one word.
    learner.train_from_iterator((text[i : i + 4096] for text in texts for i in range(0, len(text), 4096)), trainer)
    vocabulary = learner.get_vocab()
    return build(name, WORDS, [to_bytes(token) for token in sorted(vocabulary, key=vocabulary.get)])


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Text to ids, (n,) uint32; special tokens in the text are ordinary text.

    Raises DataError naming the first character that a chars tokenizer does not know, or that is half a character.
    """
    if getattr(tokenizer, "normal_form", None):
        text = unicodedata.normalize(tokenizer.normal_form, text)
    if tokenizer.name == "chars":
        unknown = set(text) - {token.decode() for token in tokenizer._mergeable_ranks}
        if unknown:
            character = min(unknown, key=text.index)
            raise DataError(f"the chars tokenizer never saw the character {character!r} (U+{ord(character):04X})")
    try:
        return tokenizer.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError as error:  # of a broken file name or JSON escape; UTF-8 has no place for it
        half = f"a lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        raise DataError(f"the text is not Unicode: it has {half}") from error
    except BaseException as error:  # the pattern of a stranger's tokenizer may make tiktoken panic
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"the pattern of the tokenizer {tokenizer.name!r} cannot split this text") from error


def document_start(tokenizer: Tokenizer) -> list[int]:
    """The ids between two documents: the last one has ended, and the next begins."""
    start = getattr(tokenizer, "start_of_text", None)
    return [tokenizer.eot_token] if start is None else [tokenizer.eot_token, start]


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token stands for; nothing if it is one of the ids that some vocabularies leave unused."""
    try:
        return tokenizer.decode_single_token_bytes(token)
    except KeyError:
        return b""


def text_prefix(tokenizer: Tokenizer) -> bytes:
    """What the tokens of a text begin with besides the text: a space, in some vocabularies of the hub."""
    return getattr(tokenizer, "prefix", b"")


def special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of the tokens that no text has, by their names."""
    return tokenizer.special_tokens if isinstance(tokenizer, HubTokenizer) else tokenizer._special_tokens


def cuts_anywhere(tokenizer: Tokenizer) -> bool:
    """Whether the pieces of a document, cut as data/sources.py does, have the tokens of the whole."""
    return not isinstance(tokenizer, HubTokenizer)


def token_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """(V,) the bytes each token stands for; 0 for special tokens and unused ids.

    If a tokenizer writes a prefix, the token that starts a document has minus its length, so that a document's tokens
    have the bytes of its text.
    """
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    if isinstance(tokenizer, HubTokenizer):
        for rank, token in tokenizer.ordinary.items():
            lengths[rank] = len(token)
        lengths[document_start(tokenizer)[-1]] = -len(tokenizer.prefix)
    else:
        for token, rank in tokenizer._mergeable_ranks.items():
            lengths[rank] = len(token)
    return lengths


def split_into_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Cut text by a pattern, then spell each part as bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def save_tokenizer(tokenizer: tiktoken.Encoding, directory: Path) -> None:
    """Write FILES, which `load_tokenizer` reads, and `tokenizers` and `transformers` too."""
    ranks = tokenizer._mergeable_ranks
    spelled = {"".join(SPELLING[byte] for byte in token): rank for token, rank in ranks.items()}
    # tiktoken joins any two neighbours that form a token, lowest rank first: list every such pair in that order.
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(spelled, key=spelled.get)
        for cut in range(1, len(token))
        if token[:cut] in spelled and token[cut:] in spelled
    ]
    # In the vocabulary special tokens keep their ids; added to it they would get the next free ones.
    vocabulary = spelled | tokenizer._special_tokens
    # What chars does not know would be left out there without a word, which flatters a model: it costs a token instead.
    unknown = {"unk_token": END_OF_TEXT, "fuse_unk": True}
    copy = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True, **unknown))
    copy.pre_tokenizer = split_into_bytes(tokenizer._pat_str)
    copy.decoder = decoders.ByteLevel()
    copy.add_special_tokens(sorted(tokenizer._special_tokens, key=tokenizer._special_tokens.get))
    (directory / FILES[0]).write_text(copy.to_str(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "tril_name": tokenizer.name}
    config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    (directory / FILES[1]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read the tokenizer of a corpus or checkpoint: one of ours, or one of the Hugging Face hub.

    Whatever the token is called there that ends a text, here it is END_OF_TEXT; `start_of_text` is the id that a text
    has to begin with, if any. Raises DataError for a tokenizer that cannot be read, or loses text.
    """
    try:
        for name in FILES:
            if not (directory / name).is_file():
                raise ValueError(f"there is no {name}")
            if (directory / name).stat().st_size > MOST_JSON:
                raise ValueError(f"{name} has more than {MOST_JSON} bytes")
        content, config = (json.loads((directory / name).read_text(encoding="utf-8")) for name in FILES)
        start, end = (special(config.get(f"{which}_token")) for which in ("bos", "eos"))
        try:
            return byte_level(config.get("tril_name", directory.name), content, start, end)
        except (LookupError, TypeError, AttributeError, ValueError):
            if "tril_name" in config:
                raise
        return HubTokenizer(directory / FILES[0], content, start, end)
    except (OSError, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DataError(f"{directory} has no tokenizer that this version can read: {error!r:.200}") from error


def byte_level(name: str, content: dict, start: str | None, end: str | None) -> tiktoken.Encoding:
    """The encoding that a tokenizer.json of a byte-level BPE describes. Raises ValueError, or whatever breaks, if none.

    start, end: the names of the tokens around a text.
    """
    specials = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary = content["model"]["vocab"]
    words = [token for token in vocabulary if token not in specials]
    if not all(character in BYTES for word in words for character in word):
        raise ValueError("it is not a byte-level BPE")
    ranks = {to_bytes(word): vocabulary[word] for word in words}
    # tiktoken does not survive some things: ids that are none or twice there, a byte that is nowhere.
    ids = [*ranks.values(), *specials.values()]
    distinct = len(ids) == len(set(ids)) and all(type(id) is int and 0 <= id < MOST_TOKENS for id in ids)
    complete = name == "chars" or all(bytes([byte]) in ranks for byte in range(256))
    if not distinct or not complete or not isinstance(name, str) or b"" in ranks:
        raise ValueError("its vocabulary is not one of bytes")
    if name == "chars":
        [token.decode() for token in ranks]  # each is a character
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in content["model"]["merges"]]
    merged = [vocabulary["".join(pair)] for pair in pairs]
    if merged != sorted(merged):
        raise ValueError("its merges are not in the order of its ids")
    begins = start in specials and json.dumps(start) in json.dumps(content.get("post_processor"))
    if END_OF_TEXT not in specials:
        specials[END_OF_TEXT] = specials[end]
    normalizer = content.get("normalizer") or {"type": None}
    if normalizer["type"] not in (None, "NFC"):
        raise ValueError(f"it changes text in the way {normalizer['type']!r}")
    tokenizer = tiktoken.Encoding(name, pat_str=pattern(content), mergeable_ranks=ranks, special_tokens=specials)
    tokenizer.normal_form, tokenizer.start_of_text = normalizer["type"], specials[start] if begins else None
    if name != "chars" and tokenizer.decode_bytes(encode(tokenizer, SAMPLE).tolist()) != SAMPLE.encode():
        raise ValueError("its pattern loses text")
    return tokenizer


def special(token: str | dict | None) -> str | None:
    """The text of a special token, which some files wrap."""
    return token["content"] if isinstance(token, dict) else token


def pattern(content: dict) -> str:
    """How a byte-level tokenizer.json cuts a text into words. Raises ValueError if it is not byte-level."""
    *before, last = content["pre_tokenizer"].get("pretokenizers", [content["pre_tokenizer"]])
    if last["type"] == "ByteLevel" and not last.get("add_prefix_space"):
        if not before and last.get("use_regex", True):
            return GPT2_WORDS
        cuts = [step for step in before if step["type"] == "Split" and step["behavior"] == "Isolated"]
        if len(before) == len(cuts) == 1 and not cuts[0].get("invert") and not last.get("use_regex", True):
            return cuts[0]["pattern"]["Regex"]
    raise ValueError("it does not cut text into words of bytes")
