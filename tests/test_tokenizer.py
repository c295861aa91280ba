"""Tokenizers: any text comes back, and other people's tools read the same ids from our files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from data import DataError
from data.tokenizer import (
    END_OF_TEXT,
    WORDS,
    build,
    encode,
    load_tokenizer,
    make_tokenizer,
    save_tokenizer,
    token_bytes,
    token_lengths,
)

TEXT = "the cat sat on the mat, the cat's hat: 12345!\n\n\tnaïve façade, 猫 🐈 \r\n" * 5
NAMES = ["bytes", "bpe:280"]
ALL = {name: make_tokenizer(name, [TEXT]) for name in (*NAMES, "chars")}


def text_of(tokenizer: tiktoken.Encoding, ids: list[int]) -> str:
    return b"".join(token_bytes(tokenizer, token) for token in ids).decode()


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_comes_back(name: str, text: str) -> None:
    ids = encode(ALL[name], text).tolist()
    assert text_of(ALL[name], ids) == text
    assert all(0 <= token < ALL[name].eot_token for token in ids)


@settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet=sorted(set(TEXT))))
def test_chars_has_one_token_per_character(text: str) -> None:
    ids = encode(ALL["chars"], text).tolist()
    assert len(ids) == len(text)
    assert text_of(ALL["chars"], ids) == text


def test_chars_names_the_character_it_does_not_know() -> None:
    with pytest.raises(DataError, match=r"never saw the character 'ß' \(U\+00DF\)"):
        encode(ALL["chars"], "the maß ñ")


def test_elsewhere_an_unknown_character_counts(tmp_path: Path) -> None:
    """Left out, it would cost a model nothing, and flatter it when other tools divide a loss by bytes."""
    save_tokenizer(ALL["chars"], tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids, unknown = theirs.encode("the maß 🐈ñ🦙").ids, ALL["chars"].eot_token
    assert ids == [*encode(ALL["chars"], "the ma"), unknown, *encode(ALL["chars"], " 🐈"), unknown, unknown]


def test_half_a_character_is_named() -> None:
    with pytest.raises(DataError, match=r"lone surrogate U\+D800 at 4"):
        encode(ALL["bytes"], "half\ud800")


def test_special_tokens_in_a_text_are_text() -> None:
    for name in NAMES:
        assert ALL[name].eot_token not in encode(ALL[name], f"a {END_OF_TEXT} b").tolist()


@pytest.mark.parametrize("name, size", [("bytes", 257), ("bpe:280", 280), ("chars", len(set(TEXT)) + 1)])
def test_end_of_text_is_the_last_token(name: str, size: int) -> None:
    assert ALL[name].n_vocab == size
    assert ALL[name].eot_token == size - 1


def test_lengths_count_bytes() -> None:
    for tokenizer in ALL.values():
        assert token_lengths(tokenizer)[encode(tokenizer, TEXT)].sum() == len(TEXT.encode())
        assert token_lengths(tokenizer)[tokenizer.eot_token] == 0


def test_special_tokens_behind_a_gap_keep_their_ids(tmp_path: Path) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}  # as in cl100k_base: 257 is the end of text, 256 is unused
    gap = tiktoken.Encoding(
        "gap", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 257, "<|x|>": 276}
    )
    save_tokenizer(gap, tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eot_token, loaded.n_vocab) == (257, 277) and loaded._special_tokens == gap._special_tokens
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert (theirs.token_to_id(END_OF_TEXT), theirs.token_to_id("<|x|>")) == (257, 276)
    assert theirs.encode(f"a{END_OF_TEXT}b").ids == [97, 257, 98]


def test_unused_ids_stand_for_nothing() -> None:
    gap = tiktoken.Encoding("gap", pat_str=WORDS, mergeable_ranks={b"a": 0}, special_tokens={END_OF_TEXT: 2})
    assert token_bytes(gap, 1) == b""


def test_bpe_learns_frequent_words() -> None:
    assert encode(make_tokenizer("bpe:400", ["banana " * 100]), " banana").size == 1


@pytest.mark.parametrize("name", ALL)
def test_files_give_the_same_tokenizer_back(name: str, tmp_path: Path) -> None:
    save_tokenizer(ALL[name], tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.name == name
    assert loaded.n_vocab == ALL[name].n_vocab
    assert encode(loaded, TEXT).tolist() == encode(ALL[name], TEXT).tolist()


@pytest.mark.parametrize("name", ALL)
def test_hugging_face_tokenizers_give_the_same_ids(name: str, tmp_path: Path) -> None:
    save_tokenizer(ALL[name], tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = encode(ALL[name], TEXT).tolist()
    assert theirs.encode(TEXT, add_special_tokens=False).ids == ids
    assert theirs.decode(ids) == TEXT
    assert theirs.token_to_id(END_OF_TEXT) == ALL[name].eot_token


def test_a_tokenizer_that_merges_across_its_own_order_is_kept(tmp_path: Path) -> None:
    # tiktoken joins any neighbours that form a token: abc is reached through a+bc as well as through ab+c.
    tokens = [bytes([byte]) for byte in range(256)] + [b"bc", b"ab", b"abc"]
    ours = build("ours", WORDS, tokens)
    save_tokenizer(ours, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("abc", "xabcx", "abcabc", "aabcc", "bcab"):
        assert theirs.encode(text).ids == encode(ours, text).tolist()


@pytest.mark.parametrize("name", ["gtp2", "bpe:", "bpe:12", "bpe:many"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="unknown tokenizer 'gtp2': expected bytes|a bpe tokenizer has 257 tokens"):
        make_tokenizer(name, [TEXT])


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no tokenizer that this version can read"):
        load_tokenizer(tmp_path)


def train_their_bpe(directory: Path, start: bool, cut: str | None) -> tokenizers.Tokenizer:
    """A byte-level BPE as others save it, with its own names for the tokens around a text."""
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut is None)
    split = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(cut), "isolated")] if cut else []
    learner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([*split, byte_level]) if cut else byte_level
    learner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator([TEXT * 3, "the theory of these things, there and then"], trainer)
    learner.add_special_tokens(["<|begin|>", "<|end|>"])
    if start:
        begin = [("<|begin|>", learner.token_to_id("<|begin|>"))]
        learner.post_processor = tokenizers.processors.TemplateProcessing("<|begin|> $A", special_tokens=begin)
    learner.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "lstrip": False}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return learner


@pytest.mark.parametrize("cut", [None, WORDS], ids=["gpt2's words", "a split"])
@pytest.mark.parametrize("start", [False, True])
def test_a_tokenizer_of_the_hub_gives_the_same_ids(tmp_path: Path, start: bool, cut: str | None) -> None:
    theirs, ours = train_their_bpe(tmp_path, start, cut), load_tokenizer(tmp_path)

    @given(text=st.text() | st.text(alphabet=sorted(set(TEXT + "'é猫 \n"))))
    @settings(deadline=None, max_examples=100)
    def check(text: str) -> None:
        assert encode(ours, text).tolist() == theirs.encode(text, add_special_tokens=False).ids

    check()
    assert ours.eot_token == theirs.token_to_id("<|end|>")
    assert ours.start_of_text == (theirs.encode("a").ids[0] if start else None)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content.update(pre_tokenizer={"type": "Whitespace"}), "does not give a text back"),
        (lambda content: content["model"]["vocab"].pop("a"), "cannot open it"),
        (lambda content: content.update(normalizer={"type": "Lowercase"}), "does not give a text back"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, change: Callable, message: str) -> None:
    train_their_bpe(tmp_path, False, None)
    load_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_merges_in_another_order_than_ids_are_followed(tmp_path: Path) -> None:
    """tiktoken has one order for both, so it cannot be that."""
    train_their_bpe(tmp_path, False, None)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"].reverse()
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    theirs, ours = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_tokenizer(tmp_path)
    assert encode(ours, TEXT).tolist() == theirs.encode(TEXT).ids
    assert text_of(ours, encode(ours, TEXT).tolist()) == TEXT


def test_what_a_tokenizer_does_to_text_first_is_done(tmp_path: Path) -> None:
    theirs = train_their_bpe(tmp_path, False, None)
    theirs.normalizer = tokenizers.normalizers.NFC()
    theirs.save(str(tmp_path / "tokenizer.json"))
    for text in ("cafe\u0301", "café", "\u1100\u1161"):
        assert encode(load_tokenizer(tmp_path), text).tolist() == theirs.encode(text).ids


def test_what_a_pattern_leaves_out_is_not_lost(tmp_path: Path) -> None:
    """tiktoken has tokens for what the pattern finds only, `tokenizers` also for what is between."""
    theirs, ours = train_their_bpe(tmp_path, False, r"\w+"), load_tokenizer(tmp_path)
    assert encode(ours, TEXT).tolist() == theirs.encode(TEXT).ids
    assert text_of(ours, encode(ours, TEXT).tolist()) == TEXT


def test_a_file_without_a_name_for_the_end_has_gpt2s(tmp_path: Path) -> None:
    save_tokenizer(ALL["bpe:280"], tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    assert load_tokenizer(tmp_path).eot_token == ALL["bpe:280"].eot_token
