"""Text to token ids and back, by a tokenizer.json: its own library reads it, and `tiktoken` encodes by those of ours.

Special tokens, such as the end of a text, have no text. Their names in a text are ordinary text. (A tokenizer of whole
words, or Unigram, may know such a name as a word nevertheless.)
"""

import json
import re
from collections.abc import Iterable, Sequence

import numpy as np
import tiktoken
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from data.sources import in_pieces
from errors import UserError, errors_as_user_error

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
REPLACEMENT = "\ufffd"  # the character that stands for bytes that are not UTF-8

# A byte-level tokenizer.json spells each byte as a printable character, as GPT-2 did (Radford et al. 2019): a byte that
# is printable as itself, and the others in their order as the characters from U+0100 on.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
IN_ALPHABET_ORDER = sorted(range(256), key=lambda byte: chr(byte) not in ALPHABET)
SPELLING = dict(zip(IN_ALPHABET_ORDER, ALPHABET, strict=True))
UNSPELLING = {ord(character): byte for byte, character in SPELLING.items()}


def to_bytes(spelled: str) -> bytes:
    """Return the bytes of a spelling, which has no other characters than ALPHABET."""
    return spelled.translate(UNSPELLING).encode("latin-1")


def split_into_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    """Return the step that cuts text by a pattern and spells each part as bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


class Tokenizer:
    """Any tokenizer.json, through the library `tokenizers`: the ids are those that `AutoTokenizer` gives.

    A text has to be encoded as a whole, because each id may depend on all of it. (A class of `transformers` may ignore
    parts of the file: LlamaTokenizer of version 5 drops a space with which a text begins.)

    Args:
        name: for messages.
        library: the tokenizer, whose settings are changed.
        ends: the ids or names of the tokens that end a text. The first that exists is end_of_text, unless there is
            "<|endoftext|>".

    Attributes:
        vocab_size: one more than the largest id of a text, its start or its end. Some smaller ids may be unused.
        end_of_text: the id that is written before each document. None if the tokenizer has none.
        ends: the ids at which a sample ends: end_of_text, then others, such as the end of an answer. Some may be ids of
            the model that the tokenizer does not have.
        start_of_text: the ids with which a prompt has to begin, mostly one (BOS); empty if there are none.
        special_tokens: the special tokens: name -> id.
        files: the content of the tokenizer's files by name, as it was read or is to be written: set by who makes it.

    Raises any exception for a tokenizer without tokens.
    """

    def __init__(self, name: str, library: tokenizers.Tokenizer, ends: Iterable[int | str]):
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True  # a special token's name in a text is ordinary text
        if isinstance(library.model, models.BPE):
            library.model.dropout = None  # which would draw ids at random
            # Else what is unknown is left out, without an error.
            library.model.unk_token = library.model.unk_token or "for this character"
        self.library = library
        self.name = name
        self.added = library.get_added_tokens_decoder()
        self.special_tokens = {token.content: number for number, token in self.added.items() if token.special}
        self.vocabulary = library.get_vocab()
        numbers = self.vocabulary | {number: number for number in self.vocabulary.values()}
        found = [numbers[end] for end in (END_OF_TEXT, *ends) if end in numbers]
        self.end_of_text = found[0] if found else None
        self.ends = list(dict.fromkeys([*found, *(end for end in ends if isinstance(end, int))]))
        # The library adds a start, if the file asks for one, to the ids of any text: here to those of a word.
        word = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a")).encode("a")
        framed = library.post_process(word)
        self.start_of_text = framed.ids[: framed.special_tokens_mask.index(0)]
        # Some models have no row for special tokens that are only added, to fill texts for example. No text has them.
        ids = list(library.get_vocab(with_added_tokens=False).values())
        ids += [number for number, token in self.added.items() if not token.special]
        ids += self.document_start
        self.vocab_size = max(ids) + 1
        # JSON with the names of all steps. The text of the decoder itself is cut after five of them.
        self.decoders = str(library.decoder and library.decoder.__getstate__())

    def check_fits(self, rows: int) -> None:
        """Raise UserError if a text can have an id that a model with this many embeddings has no embedding for."""
        if self.vocab_size > rows:
            raise UserError(
                f"the tokenizer {self.name!r} has {self.vocab_size} tokens, the model {rows}: take its own "
                "tokenizer, or give the model as many rows, by resize_token_embeddings of transformers"
            )

    @property
    def document_start(self) -> list[int]:
        """The ids before each document: end_of_text and start_of_text, as far as the tokenizer has them."""
        return [token for token in (self.end_of_text, *self.start_of_text) if token is not None]

    @property
    def identity(self) -> tuple[bytes, list[int]]:
        """What decides the ids of a text. The other files may be of another version."""
        return self.files[TOKENIZER_JSON], self.document_start

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, (n,) uint32. The name of a special token in the text is ordinary text.

        Raises UserError for a lone surrogate, and for text that the tokenizer cannot encode.
        """
        with errors_as_user_error(f"the tokenizer {self.name!r} cannot encode this text"):
            text.encode()  # raises UnicodeEncodeError for a lone surrogate
            return self.encode_unicode(text)

    def encode_unicode(self, text: str) -> np.ndarray:
        """Return the ids of a text without lone surrogates, for `encode`. May raise any exception."""
        return np.array(self.library.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids. Special tokens and unused ids have no text. Broken characters become U+FFFD."""
        with errors_as_user_error(f"the tokenizer {self.name!r} cannot decode its ids"):
            return self.library.decode(list(ids), skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that label one token: its text, the name of a special token, or b"" for an unused id."""
        spelled = self.library.id_to_token(token) or ""
        if token in self.added:
            return spelled.encode()
        if '"ByteFallback"' in self.decoders and (byte := re.fullmatch("<0x([0-9A-F]{2})>", spelled)):
            return bytes.fromhex(byte[1])
        if '"ByteLevel"' in self.decoders and set(spelled) <= set(ALPHABET):
            return to_bytes(spelled)
        return spelled.replace("\u2581", " ").encode()  # SentencePiece's sign for a space (Kudo and Richardson 2018)


class TiktokenTokenizer(Tokenizer):
    """A tokenizer of ours: its text is encoded by `tiktoken`, which is faster, and may be encoded in pieces.

    Args:
        name: bytes, chars, bpe:SIZE or a name that tiktoken knows.
        library: as `from_ranks` makes it.
        content: of its tokenizer.json, whose pattern cuts text into words.
    """

    def __init__(self, name: str, library: tokenizers.Tokenizer, content: bytes):
        super().__init__(name, library, [])
        special = self.special_tokens
        ranks = {to_bytes(spelled): rank for spelled, rank in self.vocabulary.items() if spelled not in special}
        split = json.loads(content)["pre_tokenizer"]["pretokenizers"][0]  # of `split_into_bytes`
        pattern = split["pattern"]["Regex"]
        self.encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.characters = {token.decode() for token in ranks} if name == "chars" else None
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "tril_name": name,
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
        }
        self.files = {TOKENIZER_JSON: content, TOKENIZER_CONFIG: f"{json.dumps(config, indent=2)}\n".encode()}

    def encode_unicode(self, text: str) -> np.ndarray:
        if self.characters and (unknown := set(text) - self.characters):
            first = min(unknown, key=text.index)
            raise UserError(f"the chars tokenizer never saw the character {first!r} (U+{ord(first):04X})")
        encode = self.encoding.encode_to_numpy
        return np.concatenate([encode(piece, disallowed_special=()) for piece in in_pieces([text])])


def from_ranks(name: str, pattern: str, ranks: dict[bytes, int], special: dict[str, int]) -> TiktokenTokenizer:
    """Return the tokenizer that a `tiktoken.Encoding` of these arguments is."""
    spelled = {token.decode("latin-1").translate(SPELLING): rank for token, rank in ranks.items()}
    # tiktoken joins any two neighbours that form a token, lowest rank first: list every such pair in that order.
    merges = [
        (token[:place], token[place:])
        for token in sorted(spelled, key=spelled.get)
        for place in range(1, len(token))
        if token[:place] in spelled and token[place:] in spelled
    ]
    # In the vocabulary special tokens keep their ids. Only added, they would get the next free ones.
    vocabulary = spelled | special
    # Without unk_token, other tools would leave out a character that chars does not know, which flatters a model.
    model = models.BPE(vocabulary, merges, ignore_merges=True, unk_token=END_OF_TEXT, fuse_unk=True)
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = split_into_bytes(pattern)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(sorted(special, key=special.get))
    return TiktokenTokenizer(name, library, library.to_str().encode())
