"""The benchmarks that run anywhere, with everything small."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_of_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_heads_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    heads = load("heads", monkeypatch)
    monkeypatch.setattr(heads, "alone", lambda work, *arguments: work(*arguments))
    out = tmp_path / "results.jsonl"
    heads.main(heads.Options(tiny=True, out=out))
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert all({"cpu", "device", "torch", "threads", "date"} <= set(result) for result in results)
    scores, eager, training, page = results
    assert scores["way"] == "ours" and eager["way"] == "eager"
    assert scores["all_seconds"] > 0 and eager["all_seconds"] > 0
    assert training["share"] == training["summary_seconds"] / (training["eval_every"] * training["step_seconds"])
    assert page["weights"] == page["heads"] * 36 and page["page_bytes"] > page["weights"]


def test_the_estimate_of_scaling_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load("scaling", monkeypatch).table() in (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_ranks_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed, out = load("distributed", monkeypatch), tmp_path / "results.jsonl"
    distributed.main(distributed.Options(tiny=True, nproc=(2,), steps=6, turns=1, out=out))
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [result["way"] for result in results] == ["alone", "ddp, 2 ranks", "fsdp, 2 ranks"]
    assert all(result["tokens_per_second"] > 0 for result in results)


def test_decoding_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, out = load("decode", monkeypatch), tmp_path / "results.jsonl"
    decode.main(decode.Options(tiny=True, repeats=2, out=out))
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [result["batch"] for result in results] == [1] * 4 + [3] * 4
    for result in results:
        assert {"device", "torch", "transformers", "date"} <= set(result)
        assert result["first_token_seconds"] > 0 and result["tokens_per_second"] > 0
        assert "bfloat16" in result["way"] or result["same"] == result["new"] == 7
