"""Our tokenizers: any text comes back, and other people's tools read the same ids from our files."""

from pathlib import Path

import pytest
import tiktoken
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from data.encoding import from_ranks
from data.tokenizer import END_OF_TEXT, WORDS, TiktokenTokenizer, build, load_tokenizer, make_tokenizer, save_tokenizer
from errors import UserError
from sample import Text

TEXT = "the cat sat on the mat, the cat's hat: 12345!\n\n\tnaïve façade, 猫 🐈 \r\n" * 5
ALL = {name: make_tokenizer(name, [TEXT]) for name in ("bytes", "bpe:280", "chars")}
ANY_TEXT = st.text() | st.text(sorted(set(TEXT)))


def grow(text: Text, ids: list[int]) -> list[str]:
    """What is taken of a text after each token, and in the end."""
    parts = [text.add(token) or text.take() for token in ids]
    text.finish = text.finish or "length"
    return [*parts, text.take()]


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_text_comes_back_and_so_does_what_is_taken_while_one_grows(name: str, data: st.DataObject) -> None:
    text = data.draw(st.text(sorted(set(TEXT))) if name == "chars" else ANY_TEXT)
    ids = ALL[name].encode(text).tolist()
    assert ALL[name].decode(ids) == text
    assert b"".join(map(ALL[name].token_bytes, ids)) == text.encode()
    assert all(0 <= token < ALL[name].end_of_text for token in ids)
    assert name != "chars" or len(ids) == len(text)

    *parts, last = grow(Text(ALL[name], "", TEXT), ids)
    assert "".join(parts) == text.rstrip("\ufffd") == text.removesuffix(last)  # such a character may be a part of one
    ids = data.draw(st.lists(st.integers(0, ALL[name].end_of_text - 1)))  # also bytes that are no text
    text = Text(ALL[name], "", "")
    assert "".join(grow(text, ids)) == text.text == ALL[name].decode(ids)


def test_chars_names_the_character_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"never saw the character 'ß' \(U\+00DF\)"):
        ALL["chars"].encode("the maß $")
    # Left out by other tools, it would cost a model nothing, and flatter it when a loss is divided by bytes.
    save_tokenizer(ALL["chars"], tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    unknown = ALL["chars"].end_of_text
    cat = ALL["chars"].encode(" 🐈").tolist()
    assert theirs.encode("the maß 🐈ñ🦙").ids == [*ALL["chars"].encode("the ma"), unknown, *cat, unknown, unknown]


def test_special_tokens_behind_a_gap_keep_their_ids(tmp_path: Path) -> None:
    """As in cl100k_base: 257 is the end of text, and nothing has the id 256."""
    ranks, special = {bytes([byte]): byte for byte in range(256)}, {END_OF_TEXT: 257, "<|x|>": 276}
    save_tokenizer(from_ranks("gap", WORDS, ranks, special), tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert (loaded.end_of_text, loaded.vocab_size, loaded.special_tokens) == (257, 277, special)
    assert loaded.token_bytes(256) == b"" and loaded.decode([97, 256, 999, 98]) == "ab"
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.encode(f"a{END_OF_TEXT}b<|x|>").ids == [97, 257, 98, 276]


@pytest.mark.parametrize("name", ALL)
def test_files_give_the_same_tokenizer_to_us_and_to_transformers(name: str, tmp_path: Path) -> None:
    save_tokenizer(ALL[name], tmp_path)
    loaded, theirs = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = ALL[name].encode(TEXT).tolist()
    assert (loaded.name, loaded.vocab_size, loaded.end_of_text) == (name, len(theirs), theirs.eos_token_id)
    assert type(loaded) is TiktokenTokenizer
    assert loaded.encode(TEXT).tolist() == ids == theirs(TEXT)["input_ids"]
    assert loaded.decode(ids) == TEXT == theirs.decode(ids)


def test_a_tokenizer_that_merges_across_its_own_order_is_kept(tmp_path: Path) -> None:
    # tiktoken joins any neighbours that form a token: abc is reached through a+bc as well as through ab+c.
    ours = build("ours", WORDS, [bytes([byte]) for byte in range(256)] + [b"bc", b"ab", b"abc"])
    save_tokenizer(ours, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("abc", "xabcx", "abcabc", "aabcc", "bcab"):
        assert theirs.encode(text).ids == ours.encode(text).tolist()


def test_a_vocabulary_that_cannot_be_downloaded_is_a_short_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody is there
    with pytest.raises(UserError, match=r"or can download: \w+: no answer from openaipublic.blob.core.windows.net\Z"):
        make_tokenizer("gpt2", [TEXT])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="'gtp2' is not bytes, chars, bpe:SIZE, .*: Unknown encoding gtp2"):
        make_tokenizer("gtp2", [TEXT])
    for name in ("bpe:12", "bpe:many", "bpe:99999999999999999999"):
        with pytest.raises(UserError, match=f"a bpe tokenizer has 257 tokens or more, as in bpe:4096, got '{name}'"):
            make_tokenizer(name, [TEXT])
