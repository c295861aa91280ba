"""Tokenizers that tiktoken cannot be: the ids of `transformers`, the text as it was, and documents as a whole."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import inspect_attention
import sample
import train
from data import DataError, prepare, sources, tokenise
from data.corpus import open_corpus
from data.hub_tokenizer import HubTokenizer, lines_are_apart
from data.prepare import DataConfig
from data.tokenizer import END_OF_TEXT, FILES, document_start, encode, load_tokenizer, token_bytes, token_lengths
from model import GPT
from sample import Text
from tests.test_finetune import options
from tests.test_huggingface import make
from tests.test_huggingface import save as save_model
from tests.test_tokenizer import TEXT

SPECIALS = ["<unk>", "<s>", "</s>"]
KNOWN = TEXT.replace("\r", "")
EVERYTHING = st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])) | st.text(sorted(set(TEXT)))


def llama() -> tokenizers.Tokenizer:
    """As of Llama 2: every space is ▁, with one more in front, and unknown characters are bytes."""
    learner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()  # no token has several words
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    learner.decoder = decoders.Sequence(steps)
    alphabet = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=337, special_tokens=alphabet, limit_alphabet=31, max_token_length=7, show_progress=False
    )
    learner.train_from_iterator(TEXT.split("\n"), trainer)
    content = json.loads(learner.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIALS)]  # the bytes are only in the vocabulary
    learner = tokenizers.Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": None}))
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return learner


def unigram() -> tokenizers.Tokenizer:
    """SentencePiece's other model; what it has not seen is unknown to it."""
    learner = tokenizers.Tokenizer(models.Unigram())
    learner.pre_tokenizer, learner.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=59,
        special_tokens=SPECIALS,
        unk_token="<unk>",
        initial_alphabet=sorted(set(KNOWN)),
        show_progress=False,
    )
    learner.train_from_iterator([KNOWN], trainer)
    return learner


def digits() -> tokenizers.Tokenizer:
    """As of SmolLM: byte-level BPE, with words cut in a way that is not one pattern."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    learner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=307, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator([TEXT], trainer)
    return learner


KINDS = {"llama": llama(), "unigram": unigram(), "digits": digits()}
PREFIX = {"llama": b" ", "unigram": b" ", "digits": b""}


def put(theirs: tokenizers.Tokenizer, directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    theirs.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return directory


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ours(kind: str, tmp_path: Path) -> HubTokenizer:
    return load_tokenizer(put(KINDS[kind], tmp_path / "tokenizer"))


def spell(tokenizer: HubTokenizer, ids: list[int]) -> bytes:
    return b"".join(token_bytes(tokenizer, token) for token in ids)


def test_ids_are_theirs(kind: str, ours: HubTokenizer, tmp_path: Path) -> None:
    assert isinstance(ours, HubTokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")

    @given(text=st.text(st.characters(exclude_categories=["Cs"])) | EVERYTHING)
    @settings(deadline=None, max_examples=150)
    def check(text: str) -> None:
        start = [] if ours.start_of_text is None else [ours.start_of_text]
        assert start + encode(ours, text).tolist() == theirs(text)["input_ids"]

    check()
    assert (ours.eot_token, ours.n_vocab) == (theirs.eos_token_id, len(theirs))
    assert document_start(ours) == ([2, 1] if kind == "llama" else [2])


def test_ids_are_those_of_their_own_class_for_it(tmp_path: Path) -> None:
    """Version 5 of `transformers` builds it anew, and puts no space in front of a text that begins with one."""
    directory = put(KINDS["llama"], tmp_path / "tokenizer", tokenizer_class="LlamaTokenizer", unk_token="<unk>")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(directory), load_tokenizer(directory)

    @given(text=EVERYTHING.filter(lambda text: not text.startswith(" ")))
    @settings(deadline=None, max_examples=100)
    def check(text: str) -> None:
        assert [ours.start_of_text, *encode(ours, text).tolist()] == theirs(text)["input_ids"]

    check()


def test_tokens_spell_the_text_as_their_decoder_does(kind: str, ours: HubTokenizer) -> None:
    @given(text=st.text(sorted(set(KNOWN))) if kind == "unigram" else EVERYTHING)
    @settings(deadline=None, max_examples=150)
    def check(text: str) -> None:
        ids = encode(ours, text).tolist()
        assert spell(ours, ids).removeprefix(PREFIX[kind]).decode() == KINDS[kind].decode(ids)
        lost = kind == "unigram" and text.startswith(" ")  # a space is not put in front of one
        written = text.removeprefix(" ") if lost else text
        assert KINDS[kind].decode(ids) == written
        if text:
            assert token_lengths(ours)[document_start(ours) + ids].sum() == len(written.encode())
        shown, growing = "", Text(ours, None)
        for token in ids:
            growing.add(token)
            shown += growing.unseen(is_last=False)
        assert shown + growing.unseen(is_last=True) == written

    check()


def test_a_prompt_and_what_follows_read_as_one_text(ours: HubTokenizer) -> None:
    prompt, rest = "the cat sat", " on the mat,  the hat"
    ids = encode(ours, prompt + rest).tolist()
    assert ids[: len(encode(ours, prompt))] == encode(ours, prompt).tolist()
    continued = Text(ours, None, prompt)
    for token in ids[len(encode(ours, prompt)) :]:
        continued.add(token)
    assert prompt + continued.text == prompt + rest


def test_unknown_characters_are_a_token_of_no_bytes(tmp_path: Path) -> None:
    ours = load_tokenizer(put(KINDS["unigram"], tmp_path / "tokenizer"))
    ids = encode(ours, "the ßñ cat").tolist()
    assert ids.count(0) == 1 and spell(ours, ids) == b" the <unk> cat"
    assert token_lengths(ours)[document_start(ours) + ids].sum() == len("the  cat")


def test_special_tokens_in_a_text_are_text(kind: str, ours: HubTokenizer) -> None:
    for name in ("<s>", "</s>"):
        ids = encode(ours, f"the {name} cat").tolist()
        assert not {1, 2} & set(ids)
        if kind != "unigram":  # which does not know these signs
            assert spell(ours, ids).removeprefix(PREFIX[kind]).decode() == f"the {name} cat"
    assert token_bytes(ours, ours.eot_token) == END_OF_TEXT.encode()
    assert token_bytes(ours, 1) == b"<s>" and token_lengths(ours)[1] <= 0
    assert token_bytes(ours, ours.n_vocab) == b""
    with pytest.raises(DataError, match=r"lone surrogate U\+D800 at 4"):
        encode(ours, "half\ud800")


@pytest.mark.parametrize("kind", ["llama"], indirect=True)
def test_lines_that_are_apart_are_encoded_apart(ours: HubTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.block, parts = 5, ["\n", "\n\n", " ", "the", " cat", "é", "<0x0A>", "\u0301", "</s>"]

    @given(text=st.lists(st.sampled_from(parts)).map("".join) | EVERYTHING)
    @settings(deadline=None, max_examples=300)
    def check(text: str) -> None:
        assert encode(ours, text).tolist() == ours.library.encode(text, add_special_tokens=False).ids

    check()
    monkeypatch.setattr(ours, "library", Spy(ours.library))
    encode(ours, "the cat\n" * 97)
    assert max(map(len, ours.library.asked)) < 20


class Spy:
    """A library that notes what it is asked to encode."""

    def __init__(self, library: tokenizers.Tokenizer):
        self.library, self.asked = library, []

    def encode(self, text: str, **options: object) -> tokenizers.Encoding:
        self.asked.append(text)
        return self.library.encode(text, **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["model"]["vocab"].update({"\n▁": 340}),
        lambda content: content["model"]["vocab"].update({"<0x0A>▁": 340}),
        lambda content: content["model"].update(byte_fallback=False),
        lambda content: content["model"].update(end_of_word_suffix="</w>"),
        lambda content: content["model"].update(type="Unigram"),
        lambda content: content["added_tokens"][1].update(special=False),
        lambda content: content["model"]["vocab"].pop("<0x80>"),
        lambda content: content["normalizer"]["normalizers"].append({"type": "NFKC"}),
        lambda content: content["normalizer"]["normalizers"][1].update(pattern={"Regex": "\\s+"}),
        lambda content: content.update(normalizer={"type": "NFC"}),
        lambda content: content.update(pre_tokenizer={"type": "Whitespace"}),
    ],
)
def test_other_lines_may_not_be_apart(change: Callable) -> None:
    content = json.loads(KINDS["llama"].to_str())
    assert lines_are_apart(content, content["model"]["vocab"])
    change(content)
    assert not lines_are_apart(content, content["model"]["vocab"])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_long_documents_have_the_ids_of_the_whole(
    kind: str, ours: HubTokenizer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE", 23)  # characters, at which documents are cut for others
    text = KNOWN.lstrip() * 3
    (tmp_path / name).write_text(json.dumps({"text": text}) + "\n" if name == "a.jsonl" else text)
    config = DataConfig(str(tmp_path / name), "model", val_fraction=0.1)
    corpus = prepare.prepare(config, tmp_path / "corpus", model=tmp_path / "tokenizer")
    ids = [*corpus.tokens["train"].tolist(), *corpus.tokens["val"].tolist()]
    assert ids == document_start(ours) + KINDS[kind].encode(text, add_special_tokens=False).ids
    assert corpus.meta["train"]["bytes"] + corpus.meta["val"]["bytes"] == len(text.encode())
    assert corpus.tokenizer_files == {file: (tmp_path / "tokenizer" / file).read_bytes() for file in FILES}


def test_an_interrupted_preparation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    put(KINDS["llama"], tmp_path / "tokenizer")
    monkeypatch.setattr(sources, "PIECE", 23)
    monkeypatch.setattr(tokenise, "NOTE_EVERY", 0)
    monkeypatch.setattr(tokenise, "GROUP", 1)
    rows = [json.dumps({"text": KNOWN[i : i + 101]}) for i in range(0, 307, 7)]
    (tmp_path / "a.jsonl").write_text("\n".join([*rows[:20], json.dumps({"text": ""}), *rows[20:]]))
    config = DataConfig(str(tmp_path / "a.jsonl"), "model", val_fraction=0.3)
    whole = prepare.prepare(config, tmp_path / "whole", model=tmp_path / "tokenizer")
    write, notes = tokenise.note, []

    def note(*arguments: object) -> None:
        write(*arguments)
        notes.append(arguments)
        if len(notes) == 29:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenise, "note", note)
        prepare.prepare(config, tmp_path / "broken", model=tmp_path / "tokenizer")
    capsys.readouterr()
    broken = prepare.prepare(config, tmp_path / "broken", model=tmp_path / "tokenizer")
    assert "going on after" in capsys.readouterr().out
    assert broken.meta["fingerprint"] == whole.meta["fingerprint"]
    assert broken.meta["documents"] == len(rows)


def test_a_model_is_tuned_resumed_sampled_and_inspected(run, corpus_file: Path, tmp_path: Path, monkeypatch) -> None:
    put(KINDS["llama"], tmp_path / "tokenizer")
    config = replace(make("llama").config, vocab_size=KINDS["llama"].get_vocab_size() + 2)  # some have ids to spare
    base = save_model(GPT(config), tmp_path / "made").rename(tmp_path / "base")
    (base / "manifest.json").unlink()
    for file in FILES:
        shutil.copyfile(tmp_path / "tokenizer" / file, base / file)
    arguments = options(base, corpus_file, tmp_path / "out", train__max_steps=2, train__schedule="wsd")
    assert run(train, *arguments).exit_code == 0
    shutil.rmtree(base)
    result = run(train, "--resume", tmp_path / "out", "--train.max_steps", 4)
    assert result.exit_code == 0, result.err
    checkpoint = tmp_path / "out" / "checkpoints" / "step-00000004"
    assert all((checkpoint / file).read_bytes() == (tmp_path / "tokenizer" / file).read_bytes() for file in FILES)
    saved = json.loads((checkpoint / "config.json").read_text())
    assert (saved["bos_token_id"], saved["eos_token_id"]) == (1, 2)
    corpus = open_corpus(next((tmp_path / "prepared").glob("corpus-model-*")))
    assert corpus.meta["train"]["bytes"] + corpus.meta["val"]["bytes"] == corpus_file.stat().st_size

    for prompt in ("the cat", ""):
        arguments = ("--prompt", prompt, "--temperature", 0, "--max_new_tokens", 9)
        told = json.loads(run(sample, checkpoint, *arguments, "--json").out)
        theirs = transformers.AutoTokenizer.from_pretrained(checkpoint)
        prompt_ids = theirs(prompt, return_tensors="pt")["input_ids"]
        ids = GPT.from_pretrained(checkpoint).generate(prompt_ids, 9, temperature=0)[0].tolist()
        assert told["finish"] == "length" and prompt + told["text"] == theirs.decode(ids, skip_special_tokens=True)
        assert run(sample, checkpoint, *arguments).out == f"{prompt}{told['text']}\n"
    cat = [torch.tensor([[token]]) for token in encode(load_tokenizer(checkpoint), "cat").tolist()]
    with monkeypatch.context() as patch:
        patch.setattr(sample, "stream", lambda *_: iter(cat))
        assert [run(sample, checkpoint, "--prompt", prompt).out for prompt in ("the", "")] == ["the cat\n", "cat\n"]
    result = run(inspect_attention, checkpoint, "--text", "the é", "--heads", "0.0")
    assert result.exit_code == 0, result.err
    for label in ("⟦<s>⟧", "␣the", "⟨c3⟩", "⟨a9⟩"):
        assert label in result.out


STRIP = {"type": "Strip", "strip_left": False, "strip_right": True}


def test_no_probe_has_the_start_of_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = load_tokenizer(put(KINDS["llama"], tmp_path / "tokenizer"))
    monkeypatch.setattr(inspect_attention, "repeat_probe", lambda tokens, *_, **__: tokens.tolist())
    idx = torch.arange(ours.n_vocab)[None]
    text = inspect_attention.Text(idx, idx, idx.size(1), "")
    assert inspect_attention.make_probe(ours, text, make("llama").config, 0) == list(range(3, ours.n_vocab))


def words(content: dict) -> None:
    content.update(model={"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##"})
    content["model"] |= {"max_input_chars_per_word": 9, "vocab": {"<unk>": 0, "the": 1, "##re": 2, "</s>": 3}}
    content.update(normalizer=None, pre_tokenizer={"type": "BertPreTokenizer"})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content.update(model={"type": "Neural"}), "the library `tokenizers` cannot open it: "),
        (lambda content: content["model"].update(continuing_subword_prefix="#" * 99), "cannot open it: .*out of range"),
        (
            lambda content: content.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "A"}),
            "cannot open",
        ),
        (lambda content: content.update(pre_tokenizer={"type": "FixedLength", "length": 0}), "cannot encode"),
        (lambda content: content["model"].update(dropout=0.5), "drawn at random"),
        (lambda content: content["model"]["vocab"].update(far=2**24), "ids are too large"),
        (
            lambda content: content["normalizer"]["normalizers"].append({"type": "Lowercase"}),
            "does not give a text back",
        ),
        (lambda content: content["normalizer"]["normalizers"].insert(0, STRIP), "does not give a text back"),
        (lambda content: content.update(padding={"strategy": {"Fixed": 10**12}}), "cannot open it"),
        (lambda content: content.pop("decoder"), "KeyError"),
        (words, "does not give a text back"),
    ],
)
def test_what_cannot_be_served_is_refused(run, tmp_path: Path, change: Callable, message: str) -> None:
    directory = put(KINDS["llama"], tmp_path / "tokenizer")
    content = json.loads((directory / "tokenizer.json").read_text())
    change(content)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        load_tokenizer(directory)


@pytest.mark.parametrize("end", [None, "<none>", ["</s>"]])
def test_one_that_ends_no_text_is_refused(end: object, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it has no token that ends a text|TypeError"):
        load_tokenizer(put(KINDS["llama"], tmp_path / "tokenizer", eos_token=end))


def test_one_that_cuts_or_fills_texts_does_so_elsewhere_only(tmp_path: Path) -> None:
    theirs = llama()
    theirs.enable_truncation(3)
    theirs.enable_padding(length=97)
    ours = load_tokenizer(put(theirs, tmp_path / "tokenizer"))
    assert encode(ours, TEXT).tolist() == KINDS["llama"].encode(TEXT, add_special_tokens=False).ids
