"""The benchmark that runs anywhere: everything small, and without the processes that keep its measurements apart."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "heads.py"


def test_heads_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_of_heads", SCRIPT)
    heads = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, heads)  # dataclasses look there
    spec.loader.exec_module(heads)
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
