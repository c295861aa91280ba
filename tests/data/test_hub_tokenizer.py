"""Any tokenizer.json is used as it is: the ids of `transformers`, and the text that its own decoder writes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import inspect_attention
import sample
import train
from data import prepare, sources
from data.encoding import TOKENIZER_CONFIG, TOKENIZER_JSON, Tokenizer
from data.prepare import DataConfig
from data.tokenizer import END_KEYS, END_OF_TEXT, load_tokenizer, save_tokenizer
from errors import UserError
from model import GPT
from tests.data.test_tokenizer import TEXT, grow
from tests.model.test_huggingface import make, save_foreign

SPECIALS = ["<unk>", "<s>", "</s>"]
KNOWN = TEXT.replace("\r", "")


def llama() -> tokenizers.Tokenizer:
    """As of Llama 2: every space is ▁, with one more in front, and unknown characters are bytes."""
    learner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    learner.pre_tokenizer = pre_tokenizers.Metaspace()  # no token has several words
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    learner.decoder = decoders.Sequence([decoders.Replace("▁", " ")] * 5 + steps)  # more than its str() has
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
    learner.add_tokens([tokenizers.AddedToken("\ufffd", normalized=False)])
    return learner


def digits() -> tokenizers.Tokenizer:
    """As of SmolLM: byte-level BPE with digits cut apart, and no token for the byte 0."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])
    learner.decoder = decoders.ByteLevel()
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"\u0100"})
    trainer = trainers.BpeTrainer(
        vocab_size=307, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    learner.train_from_iterator([TEXT], trainer)
    learner.add_tokens([tokenizers.AddedToken("\ufffd", normalized=False)])
    return learner


KINDS = {"llama": llama(), "digits": digits()}


def put(theirs: tokenizers.Tokenizer, directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    theirs = tokenizers.Tokenizer.from_str(theirs.to_str())
    theirs.enable_truncation(3)  # the file says so, and ours and theirs do neither
    theirs.enable_padding(length=997, pad_token="</s>")
    theirs.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return directory


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ours(kind: str, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(put(KINDS[kind], tmp_path / "tokenizer"))


def test_ids_are_theirs(kind: str, ours: Tokenizer, tmp_path: Path) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer", split_special_tokens=True)

    any_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))

    @given(text=any_text | st.text(sorted(set(KNOWN))).map("{}<s> </s>".format))
    @settings(deadline=None, max_examples=20)
    def check(text: str) -> None:
        start, ids = ours.document_start[1:], ours.encode(text).tolist()
        assert start + ids == theirs(text)["input_ids"] and not {1, 2} & set(ids)
        assert ours.decode(start + ids) == theirs.decode(ids, skip_special_tokens=True)

    check()
    assert type(ours) is Tokenizer and ours.vocab_size == len(theirs)
    assert ours.document_start == ([2, 1] if kind == "llama" else [2])
    assert ours.special_tokens == dict(zip(SPECIALS, range(3), strict=True))


def test_a_text_grows_as_their_decoder_writes_it(kind: str, ours: Tokenizer) -> None:
    @given(text=st.text(sorted({*KNOWN, "\ufffd"})), prompt=st.text(sorted(set(KNOWN))))
    @settings(deadline=None, max_examples=20)
    def check(text: str, prompt: str) -> None:
        ids, before = ours.encode(text + "\ufffd").tolist(), ours.document_start + ours.encode(prompt).tolist()
        assert "".join(grow(sample.Text(ours, "", ""), ids)) == KINDS[kind].decode(ids)
        continued = "".join(grow(sample.Text(ours, "", prompt), ids))
        assert KINDS[kind].decode(before) + continued == KINDS[kind].decode(before + ids)

    check()
    ids = ours.encode(KNOWN * 40).tolist()
    text = sample.Text(ours, "", "")
    assert "".join(grow(text, ids)) == KINDS[kind].decode(ids)
    assert len(text.last) < 3 * sample.CONTEXT < len(ids)  # nor is all of it decoded for each token
    assert "".join(grow(sample.Text(ours, "", "€" * 97), ours.encode("€" * 97).tolist()[-3:])) == "€"  # one byte each


def test_what_was_taken_stays_and_is_not_taken_again(tmp_path: Path) -> None:
    """A broken byte makes the decoder replace the whole run of bytes, the character before it too."""
    ours = load_tokenizer(put(KINDS["llama"], tmp_path))
    ids = [ours.vocabulary[f"<0x{byte}>"] for byte in ("C3", "A9", "FF")]
    assert ours.decode(ids) == "\ufffd" * 3
    assert grow(sample.Text(ours, "", ""), ids) == ["", "é", "", "\ufffd" * 2]


@pytest.mark.parametrize(
    "config, generation, names, special, ends",
    [
        ({"eos_token_id": None}, {"eos_token_id": [0, 7]}, {"eos_token": {"content": "<s>"}}, {}, [0, 7, 1]),
        ({"eos_token_id": [7, 2]}, {"eos_token_id": 1}, {"eos_token": "<unk>"}, {"eos_token": "<s>"}, [7, 2, 1, 0]),
        ({}, {}, {"eos_token": "<none>"}, {"eos_token": "<unk>"}, [0]),
        ({"eos_token_id": 10**6}, {}, {"eos_token": "</s>"}, {}, [2, 10**6]),
    ],
)
def test_a_text_ends_where_a_publisher_says(
    config: dict, generation: dict, names: dict, special: dict, ends: list[int], tmp_path: Path
) -> None:
    directory = put(KINDS["digits"], tmp_path / "theirs")
    for name, content in zip(END_KEYS, (config, generation, names, special), strict=True):
        (directory / name).write_text(json.dumps(content | {"more": "kept"}))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    ours = load_tokenizer(directory)
    assert ours.ends == ends and ours.document_start == [ours.end_of_text]
    assert ours.files["chat_template.jinja"] == b"{{ messages }}"
    (tmp_path / "corpus").mkdir()
    save_tokenizer(ours, tmp_path / "corpus")
    again = load_tokenizer(tmp_path / "corpus")
    assert again.ends == ends and again.files == ours.files
    kept = json.loads(again.files["generation_config.json"])
    assert kept == {"bos_token_id": ours.end_of_text, "more": "kept", "eos_token_id": ends}


BARE = {"</s>": 0, "the": 1, "t": 2, "h": 3, "e": 4}


@pytest.mark.parametrize("model", [models.BPE(BARE, []), models.Unigram([(name, -1.0) for name in BARE])])
def test_what_a_tokenizer_would_lose_is_refused(model: models.Model, tmp_path: Path) -> None:
    """These have no unknown token."""
    theirs = tokenizers.Tokenizer(model)
    theirs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ours = load_tokenizer(put(theirs, tmp_path))
    assert ours.encode("the\nthe").tolist() == theirs.encode("the\nthe").ids
    with pytest.raises(UserError, match="cannot encode this text: .*(?i:unk)"):
        ours.encode("the öther \0" + "the " * 9)


def put_model(kind: str, tmp_path: Path, **changes: object) -> Path:
    """A model from elsewhere with a tokenizer of theirs. It has ids to spare, as some do."""
    config = replace(make("llama").config, vocab_size=KINDS[kind].get_vocab_size() + 2)
    directory = put(KINDS[kind], save_foreign(GPT(config), tmp_path / "made"), **changes)
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(described | {"eos_token_id": None}))
    return directory


def test_a_model_from_elsewhere_is_sampled_and_inspected(run, tmp_path: Path) -> None:
    model = put_model("llama", tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    for prompt in ("the cat", ""):
        answer = run(sample, model, "--prompt", prompt, "--temperature", 0, "--max_new_tokens", 9, "--json")
        prompt_ids = theirs(prompt, return_tensors="pt")["input_ids"]
        ids = GPT.from_pretrained(model).generate(prompt_ids, 9, temperature=0)[0].tolist()
        assert prompt + json.loads(answer.out)["text"] == theirs.decode(ids, skip_special_tokens=True)
    result = run(inspect_attention, model, "--text", "the é", "--heads", "0.0").ok()
    for label in ("⟦<s>⟧", "␣the", "\\xc3", "\\xa9"):
        assert label in result.out


@pytest.mark.parametrize(
    "published, given, said, used",
    [
        (
            {"temperature": 0.6, "top_k": 0.0, "top_p": None},
            [],
            "from generation_config.json: --temperature=0.6 --top_k=0\n",
            (0.6, 0, None),
        ),
        (
            {"temperature": 1, "top_p": 0.9},
            ["--top-p=0.7"],
            "from generation_config.json: --temperature=1\n",
            (1.0, None, 0.7),
        ),
        ({"do_sample": False, "top_p": 0.9}, [], "from generation_config.json: --temperature=0\n", (0.0, None, None)),
        ({"do_sample": True, "eos_token_id": [2, 3]}, [], None, (0.8, None, None)),
        ({"top_k": ["\x1b[2J"]}, ["--top_k", 5], None, (0.8, 5, None)),
        (
            {"top_k": ["\x1b[2J"]},
            ["--temperature", 1, "--top_p", 0.5],
            "must have numbers for top_k: give your own",
            None,
        ),
        ({"temperature": -1}, [], "temperature must be a number of at least 0, got -1.0", None),
    ],
)
def test_a_model_is_sampled_as_its_publisher_says(
    run, tmp_path: Path, monkeypatch, published: dict, given: list, said: str | None, used: tuple | None
) -> None:
    model = put_model("digits", tmp_path)
    (model / "generation_config.json").write_text(json.dumps(published))
    samplers = []
    monkeypatch.setattr(sample, "stream", lambda model, idx, num, sampler, seed: samplers.append(sampler) or [])
    result = run(sample, model, *given)
    assert "generation_config" not in result.err if said is None else said in result.err
    assert [(s.temperature, s.top_k, s.top_p) for s in samplers] == [used] * (used is not None)
    assert result.exit_code == (0 if used else 2) and "\x1b" not in result.err


def test_a_model_has_rows_for_all_that_a_text_can_have(run, corpus_file: Path, tmp_path: Path) -> None:
    model, theirs = put_model("digits", tmp_path), digits()
    theirs.add_special_tokens([END_OF_TEXT, "<filling>", "<more>"])
    assert run(sample, put(theirs, model), "--max_new_tokens", 1).exit_code == 0
    ours, end = load_tokenizer(model), theirs.token_to_id(END_OF_TEXT)
    assert ours.end_of_text == end  # eos_token may end a turn only; a sample ends at either
    for token, finish in ((end, "end of text"), (2, "end of text"), (3, "")):
        text = sample.Text(ours, "", "")
        text.add(token)
        assert text.finish == finish
    theirs.add_tokens(["<tool>"])
    data = ["--data.source", corpus_file, "--data.tokenizer", "model", "--train.out_dir", tmp_path / "out"]
    for command in ([sample], [train, *data, "--train.init_from"]):
        assert "has 299 tokens, the model 297: take its own tokenizer, or give" in run(*command, put(theirs, model)).err


@pytest.mark.parametrize("template, start", [("$A </s>", []), ("<s> <x> $A </s>", [2, 3])])
def test_all_that_is_before_a_text_is_its_start_and_an_end_is_not(
    template: str, start: list[int], tmp_path: Path
) -> None:
    theirs = tokenizers.Tokenizer(models.WordLevel({"the": 0}, "<none>"))
    theirs.add_special_tokens(["</s>", "<s>", "<x>"])
    special = [(name, theirs.token_to_id(name)) for name in ("</s>", "<s>", "<x>")]
    theirs.post_processor = processors.TemplateProcessing(template, special_tokens=special)
    ours = load_tokenizer(put(theirs, tmp_path))
    assert ours.document_start == [1, *start] and ours.vocab_size == max([1, *start]) + 1


def test_a_document_has_the_ids_of_the_whole(kind: str, ours: Tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 23)  # characters, at which documents are cut for others
    text = KNOWN.lstrip() * 3
    (tmp_path / "a.txt").write_text(text)
    config = DataConfig(str(tmp_path / "a.txt"), "model")
    corpus = prepare.prepare(config, tmp_path / "corpus", model=tmp_path / "tokenizer")
    cut = int(len(text) * 0.9)
    for split, start, part in (("train", ours.document_start, text[:cut]), ("val", [], text[cut:])):
        ids = corpus.tokens[split].tolist()
        assert ids == start + KINDS[kind].encode(part, add_special_tokens=False).ids
        assert corpus.meta[split]["bytes"] == len(part.encode())
    assert corpus.tokenizer.files == ours.files
    for file in (TOKENIZER_JSON, TOKENIZER_CONFIG):
        assert ours.files[file] == (tmp_path / "tokenizer" / file).read_bytes()


PANIC = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "A"}}  # in the library's Rust code


BROKEN = [
    (TOKENIZER_JSON, {"model": {"type": "Neural"}}),
    (TOKENIZER_JSON, PANIC),
    (TOKENIZER_CONFIG, {"eos_token": [[]]}),
]


@pytest.mark.parametrize("file, change", BROKEN)
def test_a_file_that_cannot_be_used_is_refused_in_a_sentence(file: str, change: dict, tmp_path: Path) -> None:
    directory = put(KINDS["llama"], tmp_path / "tokenizer")
    content = json.loads((directory / file).read_text()) | change
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"this version cannot read .*/tokenizer.json or tokenizer_config.json: .+\Z"):
        load_tokenizer(directory)
