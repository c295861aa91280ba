"""Whatever is in a file or an option: it is used, or refused in a sentence; soon, and without much memory."""

import copy
import json
import math
import pickle
import random
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import sample
import train
from configs import parse, read_prompt, run_script
from data.corpus import open_corpus
from data.prepare import DataConfig, prepare
from data.tokenizer import load_tokenizer, make_tokenizer
from model import GPT, ModelError
from model.checkpoint import read_certificate, with_own_hash
from tests.conftest import TINY, make_gpt, sign
from training.run import Run

SECONDS, GIB = 10, 1 << 30


@pytest.fixture(autouse=True)
def counted(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """How many inputs a test tries, for the sum of all."""
    record_property("fuzzed", request.node.callspec.params.get("number", 0))


odd = [-1, 0, 1.5, 2**31, 2**63, 10**30, "../../etc/passwd", "/etc/passwd", "\0", "\x1b[2J", "O", "<u8"]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(odd),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
damages = st.lists(
    st.tuples(st.integers(0, 2**31), st.sampled_from(["set", "delete", "copy"]), values), min_size=1, max_size=3
)


def damaged(content: dict, damage: list[tuple[int, str, object]]) -> dict:
    """A nested object with some places set to another value, deleted, or set to what is elsewhere in it."""
    content = copy.deepcopy(content)
    for number, kind, value in damage:
        places = list(walk(content))
        if not places:
            break
        holder, key = places[number % len(places)]
        if kind == "delete":
            del holder[key]
        else:
            other, at = places[number // 7 % len(places)]
            holder[key] = value if kind == "set" else copy.deepcopy(other[at])
    return content


def walk(content: object) -> Iterator[tuple[dict | list, object]]:
    """(holder, key) of every value in a nested object."""
    for key in list(content) if isinstance(content, dict) else range(len(content)):
        yield content, key
        if isinstance(content[key], dict | list):
            yield from walk(content[key])


@contextmanager
def bounds() -> Iterator[None]:
    """No more than ten seconds of work, or a minute of waiting, and a GiB in addition to what there is."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"took more than {SECONDS} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, too_long) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (size + GIB, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of this process: others may be busy
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def used_or_refused(work: Callable[[], object]) -> None:
    """Run it as a script: it may end well, or with a sentence for the user; anything else is an error here."""
    with bounds():
        try:
            run_script(work)
        except SystemExit as stop:
            assert stop.code == 2


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """corpus/, a prepared corpus, and run/, a run that has a checkpoint of everything."""
    directory = tmp_path_factory.mktemp("intact")
    (directory / "corpus.txt").write_text("one two three four five six seven eight nine ten\n" * 20)
    corpus = prepare(DataConfig(str(directory / "corpus.txt"), "bytes"), directory / "corpus")
    config = parse(train.Config, options(directory))
    gpt = make_gpt(vocab_size=257)
    optimizer = torch.optim.AdamW(gpt.parameters())
    gpt(torch.zeros(1, 5, dtype=torch.int64)).sum().backward()
    optimizer.step()
    run = Run(config)
    run.begin(corpus)
    run.start({"causal": "yes"}, {"torch": "2", "dtype": "float32", "device": "cpu"})
    run.state["step"] = 3
    run.log_validation(5.0, 7.0, {}, "a text")
    run.log(train_loss=5.0)
    run.save(gpt, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    run.finish()
    return directory


def options(directory: Path) -> list[str]:
    table = {f"model.{name}": value for name, value in TINY.items()}
    table |= {"data.source": directory / "corpus.txt", "data.tokenizer": "bytes", "train.out_dir": directory / "run"}
    return [f"--{name}={value}" for name, value in table.items()]


def resume(directory: Path) -> None:
    """Everything that a resumed run reads of its directory."""
    config = parse(train.Config, [*options(directory), "--resume", str(directory / "run")])
    run, gpt = Run(config), make_gpt(vocab_size=257)
    run.begin(open_corpus(directory / "corpus"))
    run.restore(gpt, torch.optim.AdamW(gpt.parameters()), torch.amp.GradScaler("cpu", enabled=False))
    run.start({}, {"torch": "2"})
    run.finish()


CHECKPOINT = "run/checkpoints/step-00000003"


def damage_header(name: str) -> Callable[[Path, list], None]:
    """Damage the header of a safetensors file, which says what is where in it."""

    def write(directory: Path, damage: list) -> None:
        path = directory / CHECKPOINT / name
        content = path.read_bytes()
        end = 8 + struct.unpack("<Q", content[:8])[0]
        header = json.dumps(damaged(json.loads(content[8:end]), damage)).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + content[end:])

    return write


def damage_file(name: str) -> Callable[[Path, list], None]:
    """Damage a JSON file."""

    def write(directory: Path, damage: list) -> None:
        path = directory / name
        path.write_text(json.dumps(damaged(json.loads(path.read_text()), damage)))

    return write


def damage_manifest(directory: Path, damage: list) -> None:
    path = directory / CHECKPOINT / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("sha256")
    path.write_bytes(with_own_hash(damaged(manifest, damage)))


def load(directory: Path) -> None:
    model = GPT.from_pretrained(directory / CHECKPOINT)
    load_tokenizer(directory / CHECKPOINT).encode("a b, aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac 12")
    read_certificate(directory / CHECKPOINT)
    model(torch.zeros(1, 1, dtype=torch.int64))


def look_up(directory: Path) -> None:
    corpus = open_corpus(directory / "corpus")
    assert str(corpus) and corpus.tokens["train"].max() < corpus.tokenizer.vocab_size


KINDS = {  # what is damaged -> how, and who reads it
    "config.json": (damage_file(f"{CHECKPOINT}/config.json"), load),
    "model.safetensors": (damage_header("model.safetensors"), load),
    "tokenizer.json": (damage_file(f"{CHECKPOINT}/tokenizer.json"), load),
    "tokenizer_config.json": (damage_file(f"{CHECKPOINT}/tokenizer_config.json"), load),
    "manifest.json": (damage_manifest, load),
    "trainer.json": (damage_file(f"{CHECKPOINT}/trainer.json"), resume),
    "optimizer.safetensors": (damage_header("optimizer.safetensors"), resume),
    "meta.json": (damage_file("corpus/meta.json"), look_up),
}


def fuzz(few: int, many: int) -> Callable:
    """Run a test with some inputs in `make test`, with many in `make test-long`; always the same."""

    def decorate(test: Callable) -> Callable:
        marks = [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.long)]
        return pytest.mark.parametrize("number", marks)(test)

    return decorate


def with_inputs(number: int, test: Callable) -> None:
    """Let Hypothesis call a test with its inputs so many times."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    settings(max_examples=number, deadline=None, database=None, derandomize=True, suppress_health_check=quiet)(test)()


@pytest.mark.parametrize("kind", KINDS)
@fuzz(20, 1000)
def test_a_file_that_somebody_has_changed(kind: str, number: int, intact: Path, tmp_path: Path) -> None:
    damage_it, read = KINDS[kind]

    @given(damages)
    def test(damage: list) -> None:
        directory = tmp_path / "copy"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(intact, directory)
        damage_it(directory, damage)
        if kind not in ("manifest.json", "meta.json"):
            sign(directory / CHECKPOINT)
        used_or_refused(lambda: read(directory))

    with_inputs(number, test)


@fuzz(20, 1000)
def test_any_bytes_instead_of_a_file(number: int, intact: Path, tmp_path: Path) -> None:
    names = [f"{CHECKPOINT}/{path.name}" for path in sorted((intact / CHECKPOINT).iterdir())]
    names += [f"corpus/{path.name}" for path in sorted((intact / "corpus").iterdir())]

    @given(st.sampled_from(names), st.binary(max_size=200), st.integers(0, 2**31))
    def test(name: str, content: bytes, seed: int) -> None:
        directory = tmp_path / "copy"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(intact, directory)
        old = (directory / name).read_bytes()
        at = random.Random(seed).randrange(len(old))
        (directory / name).write_bytes(old[:at] + content + old[at + len(content) :] if seed % 2 else content)
        if name.startswith("run") and not name.endswith("manifest.json"):
            sign(directory / CHECKPOINT)
        for read in (load, resume, look_up):
            used_or_refused(lambda read=read: read(directory))

    with_inputs(number, test)


KEYS = [f"{table}.{name}" for table in ("model", "data", "train") for name in vars(getattr(train.Config(), table))]
keys = st.sampled_from(KEYS)
plain = st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.lists(st.integers(), max_size=3))


@fuzz(30, 600)
def test_any_configuration(number: int, tmp_path: Path) -> None:
    file = tmp_path / "some.toml"

    @given(st.dictionaries(keys | st.text(max_size=10), plain, max_size=4), st.booleans())
    def test(content: dict, is_toml: bool) -> None:
        lines = [f"{key} = {json.dumps(value) if is_toml else value}" for key, value in content.items()]
        file.write_text("\n".join(lines), encoding="utf-8", errors="replace")
        used_or_refused(lambda: train.read_config([str(file)]))

    with_inputs(number, test)


@fuzz(30, 400)
def test_any_command_line(number: int) -> None:
    @given(st.lists(st.tuples(keys, plain | st.just("--train.seed")), max_size=3))
    def test(pairs: list) -> None:
        used_or_refused(lambda: train.read_config([f"--{key}={value}" for key, value in pairs]))
        used_or_refused(lambda: parse(sample.Options, ["out", *(f"--{key}={value}" for key, value in pairs)]))

    with_inputs(number, test)


@fuzz(30, 500)
def test_any_prompt(number: int) -> None:
    tokenizers = [make_tokenizer("bytes", []), make_tokenizer("chars", ["abc é猫"])]

    @given(st.text() | st.text(st.characters(codec=None, categories=["Cs", "Cc", "Co", "L"])))
    def test(prompt: str) -> None:
        for tokenizer in tokenizers:
            used_or_refused(lambda tokenizer=tokenizer: tokenizer.encode(prompt))
        used_or_refused(lambda: read_prompt("@" + prompt))

    with_inputs(number, test)


class Canary:
    """Unpickled, it leaves a file behind."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path("canary"),)


def claims(header: dict | None = None, length: int | None = None) -> bytes:
    """A safetensors file with this header and no numbers, or one that only says how long its header is."""
    text = json.dumps(header or {}).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


LARGE = {"dtype": "F32", "shape": [2**30, 2**30], "data_offsets": [0, 2**62]}
WEIGHTS = f"{CHECKPOINT}/model.safetensors"
HOSTILE = {
    "a header of 2**63 bytes": (WEIGHTS, claims(length=2**63)),
    "a header of 90 MB, cut off": (WEIGHTS, claims(length=90_000_000)),
    "a tensor larger than any memory": (WEIGHTS, claims({"transformer.wte.weight": LARGE})),
    "a tensor of negative size": (WEIGHTS, claims({"transformer.wte.weight": {**LARGE, "shape": [-1, 2]}})),
    "a hundred thousand tensors of nothing": (
        WEIGHTS,
        claims({f"{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(100_000)}),
    ),
    "a pickle": (WEIGHTS, pickle.dumps(Canary())),
    "a million brackets": (f"{CHECKPOINT}/config.json", b"[" * 1_000_000),
    "a megabyte too much": (f"{CHECKPOINT}/config.json", b" " * 2_000_000 + b"{}"),
    "a number of five thousand digits": (f"{CHECKPOINT}/config.json", b'{"n_layer": ' + b"9" * 5000 + b"}"),
    "brackets in a manifest": (f"{CHECKPOINT}/manifest.json", b'{"format": ' + b"[" * 900_000),
    "brackets in a tokenizer": (f"{CHECKPOINT}/tokenizer.json", b"[" * 1_000_000),
    "a pickle as tokens": ("corpus/train.bin", pickle.dumps(Canary())),
    "brackets in a corpus": ("corpus/meta.json", b"[" * 1_000_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(run, intact: Path, tmp_path: Path, monkeypatch, name: str) -> None:
    path, content = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(intact, tmp_path / "copy")
    (tmp_path / "copy" / path).write_bytes(content)
    if not path.endswith(("manifest.json", ".bin", "meta.json")):
        sign(tmp_path / "copy" / CHECKPOINT)
    with bounds():
        if path.startswith("corpus"):
            result = run(train, "--data.source", tmp_path / "copy" / "corpus", "--data.tokenizer", "bytes")
        else:
            result = run(sample, tmp_path / "copy" / CHECKPOINT)
    assert result.exit_code == 2 and len(result.err) < 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"]  # and no canary


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_layer": 10**9}, "n_layer must be a whole number from 1 to 512, got 1000000000"),
        ({"n_layer": 512}, "has no tensor transformer.h.2"),
        ({"n_positions": 2**15}, r"transformer.wpe.weight is \(11, 15\), expected \(32768, 15\)"),
        ({"n_head": "3"}, "n_head must be a whole number"),
    ],
)
def test_a_model_larger_than_its_file_is_refused(intact: Path, tmp_path: Path, change: dict, message: str) -> None:
    shutil.copytree(intact, tmp_path / "copy")
    path = tmp_path / "copy" / CHECKPOINT / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | change))
    sign(path.parent)
    with bounds(), pytest.raises(ModelError, match=message):
        GPT.from_pretrained(path.parent)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(intact: Path, tmp_path: Path, value: float) -> None:
    shutil.copytree(intact, tmp_path / "copy")
    path = tmp_path / "copy" / WEIGHTS
    tensors = load_file(path)
    tensors["transformer.h.1.ln_1.weight"][3] = value
    save_file(tensors, path)
    sign(path.parent)
    with pytest.raises(ModelError, match="transformer.h.1.ln_1.weight holds numbers that are not finite"):
        GPT.from_pretrained(path.parent)
    save_file({name: tensor.long() for name, tensor in load_file(intact / WEIGHTS).items()}, path)
    sign(path.parent)
    with pytest.raises(ModelError, match="holds I64, expected floating-point numbers"):
        GPT.from_pretrained(path.parent)
