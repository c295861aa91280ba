"""Tokenizers of the Hugging Face hub that tiktoken cannot be, through the library they were made with.

A tokenizer is a `tiktoken.Encoding`, with this one exception: a tokenizer.json with another model than byte-level BPE
(as of Llama 2: a space is `▁`, an unknown character is bytes such as `<0xE2>`), or with words cut in a way of its own.
"""

import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tokenizers

END_OF_TEXT = "<|endoftext|>"
MOST_TOKENS = 1 << 24
BLOCK = 1 << 17  # characters that are encoded in one go, and more to the end of a line, where that changes nothing
SAMPLE = "".join(map(chr, range(9, 0x250))).replace("\u00a0", " ") + "  \n\n 猫🐈\u0301 e"  # of all kinds of characters

# tokenizer.json spells bytes as printable characters, the way GPT-2 did (Radford et al. 2019).
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
HIDDEN = [byte for byte in range(256) if byte not in PRINTABLE]
SPELLING = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(HIDDEN)}
BYTES = {character: byte for byte, character in SPELLING.items()}


def to_bytes(spelled: str) -> bytes:
    return bytes(BYTES[character] for character in spelled)


class HubTokenizer:
    """What is used here of a `tiktoken.Encoding`: ids are those of the library, and of `AutoTokenizer`, for a text.

    They are those of the text as a whole, so that a document must not be cut. Many write a space in front of each text,
    which is `prefix`; their decoders take it away again. (For a LlamaTokenizer version 5 of `transformers` ignores that
    the file says so, and writes none in front of a text that begins with a space.)

    content: what the file holds. start, end: the names of the tokens around a text. Raises ValueError for a file that
    the library cannot open, or a tokenizer that does not end texts, or loses more than characters that it does not
    know (one token, of no bytes) and their forms (NFKC).
    """

    def __init__(self, file: Path, content: dict, start: str | None, end: str | None):
        self.name = f"tokenizer.json of {file.parent.name}"
        with as_value_error("the library `tokenizers` cannot open it"):
            self.library = tokenizers.Tokenizer.from_file(str(file))
            self.library.no_truncation()
            self.library.no_padding()
            self.library.encode_special_tokens = True  # as text, not as what they stand for
            vocabulary, added = self.library.get_vocab(), self.library.get_added_tokens_decoder()
            begin = self.library.encode("").ids[:1]
        model, byte_level = content["model"], '"ByteLevel"' in json.dumps(content["decoder"])
        self.n_vocab = max(vocabulary.values()) + 1
        self.eot_token = vocabulary.get(END_OF_TEXT, vocabulary.get(end))
        if self.eot_token is None:
            raise ValueError("it has no token that ends a text")
        if self.n_vocab > MOST_TOKENS or model.get("dropout"):
            raise ValueError("its ids are too large, or drawn at random")
        self.start_of_text = vocabulary[start] if begin == [vocabulary.get(start)] else None
        special = {number: token.content for number, token in added.items() if token.special}
        names = special | {self.eot_token: END_OF_TEXT}
        self.special_tokens = {name: number for number, name in names.items()}
        self.ordinary = {
            number: to_bytes(token)
            if byte_level and number not in added
            else spelled(token, model.get("byte_fallback"))
            for token, number in vocabulary.items()
            if number not in names
        }
        self.tokens = self.ordinary | {number: name.encode() for number, name in names.items()}
        unknown = model["unk_id"] if "unk_id" in model else vocabulary.get(model.get("unk_token"))
        self.block = BLOCK if lines_are_apart(content, vocabulary) else sys.maxsize
        self.parts = {}
        for number, name in special.items():  # which Unigram finds in a text: there they are to be cut in two
            if number != unknown:
                with as_value_error("the library `tokenizers` cannot encode its special tokens"):
                    halves = [self.library.model.tokenize(half) for half in (name[:1], name[1:])]
                self.parts[number] = [token.id for half in halves for token in half]
        known = "".join(character for character in SAMPLE if unknown not in self.encode_to_numpy(character).tolist())
        self.prefix = self.find_prefix(known.lstrip(" ") + known[:1])  # with white space at both ends, if it is known

    def find_prefix(self, text: str) -> bytes:
        """What is written in front of each text. Raises ValueError if the tokens of this one do not spell it."""
        back = b"".join(self.tokens[token] for token in self.encode_to_numpy(text).tolist()).decode(errors="replace")
        for prefix in ("", " "):
            if text and unicodedata.normalize("NFKC", back) == unicodedata.normalize("NFKC", prefix + text):
                return prefix.encode()
        raise ValueError("it does not give a text back")

    def encode_to_numpy(self, text: str, disallowed_special: tuple = ()) -> np.ndarray:
        """Text to ids, (n,) uint32. Raises ValueError if the library cannot encode it."""
        text.encode()  # raises UnicodeEncodeError, which says where
        start, before, blocks = 0, "", [np.empty(0, np.uint32)]
        while start < len(text):
            end = text.find("\n", start + self.block) + 1 or len(text)
            with as_value_error("the library `tokenizers` cannot encode this text"):
                known = len(self.library.encode(before, add_special_tokens=False))
                ids = self.library.encode(before + text[start:end], add_special_tokens=False).ids[known:]
            blocks.append(np.array(ids, np.uint32))
            start, before = end, "\n"  # in its place comes what is written in front of a text
        ids = np.concatenate(blocks)
        if np.isin(ids, list(self.parts)).any():
            ids = np.array([part for token in ids.tolist() for part in self.parts.get(token, [token])], np.uint32)
        return ids

    def decode_single_token_bytes(self, token: int) -> bytes:
        """What a token stands for. Raises KeyError for an unused id."""
        return self.tokens[token]


def spelled(token: str, byte_fallback: bool | None) -> bytes:
    """The bytes of a token as SentencePiece (Kudo and Richardson 2018) writes it."""
    if byte_fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode()


def lines_are_apart(content: dict, vocabulary: dict[str, int]) -> bool:
    """Whether a text has the ids of its lines: no token has a newline but its byte, and only spaces are changed before.

    So it is with Llama 2. A text of any other is encoded in one go, which takes much more memory than its characters.
    """
    model, cut, change = content["model"], content["pre_tokenizer"], content["normalizer"] or {"normalizers": []}
    steps = [(step["type"], step.get("pattern")) for step in change.get("normalizers", [change])]
    return (
        model.get("type") == "BPE"
        and model.get("byte_fallback") is True
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        and not any("\n" in token or ("<0x0A>" in token and token != "<0x0A>") for token in vocabulary)
        and all(token["special"] for token in content["added_tokens"])
        and all(step in (("Prepend", None), ("Replace", {"String": " "})) for step in steps)
        and (cut is None or cut["type"] == "Metaspace")
    )


@contextmanager
def as_value_error(problem: str) -> Iterator[None]:
    """Raise a ValueError for whatever the library raises: any Exception, or that its Rust panics, which is none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{problem}: {error}") from error
