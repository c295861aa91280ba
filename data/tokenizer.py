"""Tokenizers by name, and the files that keep them, which Hugging Face tools read too.

    bytes       256 bytes, nothing to learn
    chars       the characters of the corpus
    bpe:4096    byte-pair encoding trained on the corpus, this many tokens in all
    gpt2, ...   any encoding that tiktoken knows; it downloads and caches the vocabulary on first use
    PATH        a tokenizer.json from elsewhere

The last id of bytes, chars and bpe is `<|endoftext|>`, which starts every document. Models from elsewhere bring a
tokenizer.json of their own, "model", which is used as it is, too (data/encoding.py).
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data import errors_as_user_error
from data.encoding import END_OF_TEXT, SPELLING, HubTokenizer, TiktokenTokenizer, Tokenizer, to_bytes
from errors import UserError

BPE_SAMPLE = 1 << 28  # characters that a bpe tokenizer is trained on, at most
MOST_JSON = 1 << 26  # bytes
FILES = ("tokenizer.json", "tokenizer_config.json")
ANY_CHARACTER = r"[\s\S]"  # means the same to every regex engine
# GPT-4's way to cut text into words, without possessive quantifiers, which regex engines disagree about.
WORDS = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def make_tokenizer(name: str, texts: Iterable[str]) -> TiktokenTokenizer:
    """Make a tokenizer by its name; chars and bpe read the texts. Raises UserError for an unknown name."""
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
        raise UserError(
            f"unknown tokenizer {name!r}: expected bytes, chars, bpe:SIZE, one of {known}, or the path of a "
            "tokenizer.json (from the Hugging Face hub: hf download NAME tokenizer.json)"
        )
    with errors_as_user_error(f"tiktoken could not download the vocabulary of {name!r} to TIKTOKEN_CACHE_DIR"):
        return TiktokenTokenizer(tiktoken.get_encoding(name))


def build(name: str, pattern: str, tokens: list[bytes]) -> TiktokenTokenizer:
    """Return the tokenizer with these tokens, in the order of their ids, and END_OF_TEXT after them."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    special = {END_OF_TEXT: len(ranks)}
    return TiktokenTokenizer(tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))


def train_bpe(name: str, texts: Iterable[str]) -> TiktokenTokenizer:
    """Train byte-pair encoding (Sennrich et al. 2016) over bytes. A small corpus may yield fewer tokens than asked for.

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
    learner.train_from_iterator(bpe_sample(texts), trainer)
    vocabulary = learner.get_vocab()
    return build(name, WORDS, [to_bytes(token) for token in sorted(vocabulary, key=vocabulary.get)])


def bpe_sample(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts until they have BPE_SAMPLE characters.

    Training takes quadratic time in the length of a word, so they are cut: a line without a space must not be one word.
    """
    num_characters = 0
    for text in texts:
        yield from (text[i : i + 4096] for i in range(0, len(text), 4096))
        num_characters += len(text)
        if num_characters >= BPE_SAMPLE:
            return


def split_into_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Cut text by a pattern, then spell each part as bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def save_tokenizer(tokenizer: TiktokenTokenizer, directory: Path) -> None:
    """Write FILES, which `load_tokenizer` reads, and `tokenizers` and `transformers` too."""
    encoding, special = tokenizer.encoding, tokenizer.special_tokens
    spelled = {"".join(SPELLING[byte] for byte in token): rank for token, rank in encoding._mergeable_ranks.items()}
    # tiktoken joins any two neighbours that form a token, lowest rank first: list every such pair in that order.
    merges = [
        (token[:cut], token[cut:])
        for token in sorted(spelled, key=spelled.get)
        for cut in range(1, len(token))
        if token[:cut] in spelled and token[cut:] in spelled
    ]
    # In the vocabulary special tokens keep their ids. Only added, they would get the next free ones.
    vocabulary = spelled | special
    # Other tools would leave out a character that chars does not know, which flatters a model. So it costs a token.
    unknown = {"unk_token": END_OF_TEXT, "fuse_unk": True}
    copy = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True, **unknown))
    copy.pre_tokenizer = split_into_bytes(encoding._pat_str)
    copy.decoder = decoders.ByteLevel()
    copy.add_special_tokens(sorted(special, key=special.get))
    (directory / FILES[0]).write_text(copy.to_str(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "tril_name": tokenizer.name}
    config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    (directory / FILES[1]).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_files(place: Path) -> dict[str, bytes]:
    """Read FILES of a directory, or a file as the first of them, by name; tokenizer_config.json may be missing.

    Raises UserError if there is no tokenizer.json, or if a file is too large to be a tokenizer.
    """
    first = place if place.is_file() else place / FILES[0]
    if not first.is_file():
        raise UserError(f"{place} has no tokenizer: there is no {FILES[0]}")
    paths = {name: path for name, path in zip(FILES, (first, first.with_name(FILES[1])), strict=True) if path.is_file()}
    if max(path.stat().st_size for path in paths.values()) > MOST_JSON:
        raise UserError(f"{place} has a tokenizer of more than {MOST_JSON} bytes")
    return {name: path.read_bytes() for name, path in paths.items()}


def find_tokenizer(name: str, model: Path | None) -> Path | None:
    """Return the place of a tokenizer that exists, for `read_files`: `model`, or a path; None for one to be made."""
    return model if name == "model" else Path(name) if Path(name).is_file() else None


def read_tokenizer(name: str, model: Path | None) -> tuple[Tokenizer, dict[str, bytes]]:
    """Return a tokenizer that needs no text to learn from, and its FILES. Raises UserError for an unknown name."""
    with TemporaryDirectory() as directory:
        place = find_tokenizer(name, model) or Path(directory)
        if place == Path(directory):
            save_tokenizer(make_tokenizer(name, []), place)
        return load_tokenizer(place), read_files(place)


def load_tokenizer(place: Path) -> Tokenizer:
    """Load the tokenizer of a corpus, checkpoint or file. Raises UserError for one that cannot be read."""
    files = read_files(place)
    with errors_as_user_error(f"{place} has no tokenizer that this version can read"):
        config = json.loads(files.get(FILES[1], b"{}"))
        if "tril_name" in config:
            return read_ours(str(config["tril_name"]), json.loads(files[FILES[0]]))
        end = config.get("eos_token")
        end = end["content"] if isinstance(end, dict) else end  # some files wrap it
        return HubTokenizer(f"{FILES[0]} of {place.name}", files[FILES[0]], end)


def read_ours(name: str, content: dict) -> TiktokenTokenizer:
    """Return the tokenizer that a tokenizer.json of `save_tokenizer` describes. Raises anything for another file."""
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocabulary = content["model"]["vocab"]
    ranks = {to_bytes(spelled): rank for spelled, rank in vocabulary.items() if spelled not in special}
    pattern = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    return TiktokenTokenizer(tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))
