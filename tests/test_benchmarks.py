"""The benchmarks that run anywhere, with everything small."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from benchmarks import bench, nanogpt, steps
from benchmarks.timing import Bench
from model import GPT, GPTConfig
from training.config import TrainConfig

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
        assert result["first token s"] > 0 and result["tokens/s"] > 0
        assert "bfloat16" in result["way"] or result["same"] == result["new"] == 7


HERE = Bench(torch.device("cpu"), torch.float32, tiny=True)


DIFFERENCES = {"loss above", "ms a token"}  # of numbers this small, they may have any sign


def measured(stage: str) -> dict[str, dict]:
    """{what: the other entries} of a stage, everything small; no number of which may be missing or impossible."""
    results = list(bench.STAGES[stage](HERE))
    for result in results:
        assert all(value > 0 for key, value in result.items() if isinstance(value, float) and key not in DIFFERENCES)
        assert len(bench.line(stage, result["what"], result)) <= 80
    return {result.pop("what"): result for result in results}


def test_rows_are_measured() -> None:
    results = measured("rows")
    assert list(results) == ["ms of 1 x 6 matrices", "ms of 5 x 6 matrices"]
    assert all(result[way] > 0 for result in results.values() for way in ("fp32", "bf16", "fp16", "widened"))


def test_the_peak_is_measured() -> None:
    results = measured("peak")
    cube = results["fp32 matmul 64^3"]
    assert cube["TFLOP/s"] == pytest.approx(2 * 64**3 / (cube["ms"] * 1e-3) / 1e12)
    assert results["copy of 64 KiB"]["GB/s"] == pytest.approx(2**17 / (results["copy of 64 KiB"]["ms"] * 1e-3) / 1e9)
    assert all(result["ms_p10"] <= result["ms"] <= result["ms_p90"] for result in results.values())


def test_attention_is_measured() -> None:
    results = measured("attention")
    assert {"fp32 8x8 forward", "bf16 16x8 and backward"} <= results.keys()
    assert all({"seam ms", "formula ms", "chosen"} <= set(result) for result in results.values())


def test_a_step_is_measured() -> None:
    results = measured("step")
    first, second = results["nanoGPT, tiny x 3"], results["ours, gpt2, tiny x 3"]
    assert first["tokens/s"] == pytest.approx(3 * 16 / (first["ms"] * 1e-3))
    assert second["of peak"] / first["of peak"] == pytest.approx(first["ms"] / second["ms"])  # the same work
    assert results["ours, gpt2 / nanoGPT, tiny"]["same batch"] == pytest.approx(first["ms"] / second["ms"])


def test_a_step_is_split() -> None:
    results = measured("split")
    names = [f"part: {name}, ms" for name in nanogpt.PARTS]
    assert list(results) == names + [f"kernel: {name}, ms" for name in (*steps.KINDS, "rest")]
    assert all({"nanoGPT", "gpt2", "muon"} <= set(result) for result in results.values())


def test_the_parts_of_a_step_sum_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, parts = iter((0.0, 1.0, 3.0, 6.0, 10.0, 15.0)), iter((*nanogpt.PARTS, "data"))
    monkeypatch.setattr(steps.time, "perf_counter", lambda: next(clock))
    took = steps.parts_of_step(HERE, parts)
    assert took == dict(zip(nanogpt.PARTS, (1e3, 2e3, 3e3, 4e3, 5e3), strict=True))
    assert next(parts) == "data"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("aten::addmm", "matmul"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", "matmul"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "matmul"),
        ("triton_tem_fused_mm_2", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128> >", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("triton_poi_fused__scaled_dot_product_flash_attention_transpose_3", "elementwise"),
        ("triton_per_fused_mm_native_layer_norm_5", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >", "elementwise"),
        ("aten::_fused_adamw_", "elementwise"),
        ("aten::mul_", "elementwise"),
        ("aten::embedding", None),
        ("Optimizer.step#AdamW.step", None),
    ],
)
def test_kernels_are_told_apart(kernel: str, kind: str | None) -> None:
    assert steps.kind_of(kernel) == kind


def test_the_loader_and_the_optimizers_are_measured() -> None:
    assert set(measured("loader")) == {"ours, tiny x 3", "nanoGPT, tiny x 3"}
    assert set(measured("optimizer")) == {f"{way}, tiny" for way in ("Muon, ours", "Muon, torch", "AdamW, ours")} | {
        "AdamW, nanoGPT, tiny"
    }


def test_decoding_beside_nanogpt_is_measured() -> None:
    results = measured("decode")
    assert results["cache, float32 x 1"]["same"] == results["transformers, float32 x 1"]["same"] == 4


@pytest.mark.long
def test_time_to_loss_is_measured() -> None:
    results = measured("loss")
    ours, theirs = results["ours, fast, seed 1"], results["nanoGPT, its README's rate"]
    expected = {"loop": theirs["loop s"] / ours["loop s"], "process": theirs["process s"] / ours["process s"]}
    if results["nanoGPT, rate 0.004"]["loss"] <= theirs["loss"]:
        there = results["nanoGPT, rate 0.004, until there"]
        assert there["loss"] <= theirs["loss"]
        expected["loop, rate 0.004"] = there["loop s"] / ours["loop s"]
    assert results["ours, times faster"] == {**expected, "loss above": ours["loss"] - theirs["loss"]}


@pytest.mark.long
def test_tokenising_is_measured() -> None:
    results = measured("tokenise")
    assert {"tiktoken alone", "data.prepare, Parquet"} <= results.keys()


def test_results_are_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bench.main(bench.Options(stages=("peak", "loader"), device="cpu", tiny=True, out=tmp_path))
    printed = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in printed[:-1])
    (out,) = tmp_path.glob("cpu_*.jsonl")
    results = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [result["stage"] for result in results][:: len(results) - 1] == ["peak", "loader"]
    assert all({"what", "cpu", "device", "torch", "threads", "date"} <= set(result) for result in results)


@pytest.mark.parametrize("options", [{"stages": ("peak", "steps")}, {"text": Path("missing.txt")}])
def test_what_cannot_be_measured_is_said(options: dict) -> None:
    with pytest.raises(bench.ConfigError, match="steps|missing.txt"):
        bench.Options(**options)


@pytest.mark.parametrize("bias", [False, True])
def test_nanogpt_computes_what_gpt2_does(bias: bool) -> None:
    model = GPT(GPTConfig(n_layer=2, n_head=3, n_embd=48, context_length=11, vocab_size=17, bias=bias)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    idx, targets = torch.randint(17, (2, 5, 11))
    theirs = bench.as_nanogpt(model)
    logits, loss = theirs(idx, targets)
    torch.testing.assert_close(logits, model(idx), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(model(idx).transpose(1, 2), targets))
    text = theirs.generate(idx[:, :4], 7, top_k=1)
    assert text.equal(model.generate(idx[:, :4], 7, temperature=0))


def test_nanogpt_begins_and_learns_as_gpt2_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As large weights at first; and with the same weights and batches, the same weights after some steps."""
    config = GPTConfig(n_layer=2, n_head=3, n_embd=48, context_length=11, vocab_size=67, bias=False)
    ours = GPT(config)
    theirs = bench.as_nanogpt(ours).train()
    fresh = nanogpt.NanoGPT(theirs.config).state_dict()
    for name, tensor in theirs.state_dict().items():
        assert fresh[name].std().item() == pytest.approx(tensor.std().item(), rel=0.1), name

    batches = torch.randint(67, (4, 2, 5, 11))
    numbers = iter(range(4))
    monkeypatch.setattr(nanogpt, "batch", lambda *arguments: batches[next(numbers)])
    optimizer = nanogpt.make_optimizer(theirs, 0.1)
    for _ in nanogpt.training(theirs, optimizer, tmp_path, 5, learning_rate=0.1, max_steps=4):
        pass
    train = TrainConfig(learning_rate=0.1, beta2=0.99, warmup_steps=101)  # nanoGPT counts one more
    parts = steps.training(HERE, ours, train, lambda step, device: batches[step])
    for _ in batches:
        steps.one_step(parts)
    torch.testing.assert_close(bench.as_nanogpt(ours).state_dict(), theirs.state_dict(), atol=1e-5, rtol=1e-4)


def test_nanogpt_sees_its_text_and_the_next_characters(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    inputs, targets = nanogpt.batch(path, 50, 7, torch.device("cpu"))
    assert inputs.shape == (50, 7) and inputs.dtype == torch.int64 and targets.max() <= 99
    assert inputs.equal(inputs[:, :1] + torch.arange(7)) and targets.equal(inputs + 1)


def test_nanogpt_is_evaluated_on_every_token() -> None:
    model = nanogpt.NanoGPT(nanogpt.Config(2, 3, 48, context_length=11, vocab_size=17))
    tokens = torch.randint(17, (11 * 3 + 5,))
    starts = range(0, len(tokens) - 1, 11)
    windows = [(tokens[None, i : i + 11][:, : len(tokens) - 1 - i], tokens[None, i + 1 : i + 12]) for i in starts]
    total = sum(torch.nn.functional.cross_entropy(model(x, y)[0][0], y[0], reduction="sum").item() for x, y in windows)
    assert nanogpt.exact_loss(model, tokens) == pytest.approx(total / (len(tokens) - 1), rel=1e-5)


def test_the_learning_rate_of_nanogpt() -> None:
    rates = [nanogpt.learning_rate_at(step, 1.0, max_steps=1100) for step in (0, 99, 100, 600, 1100)]
    assert rates == pytest.approx([1 / 101, 100 / 101, 1.0, 0.55, 0.1])
