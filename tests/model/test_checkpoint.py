"""Checkpoints: what is saved comes back, damage is named, and other people's tools find what they expect."""

import json
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train
from errors import UserError
from model import GPT
from model.checkpoint import find_checkpoint, step_directories
from tests.conftest import make_gpt, often, run_python, save_gpt, tiny_run, write_corpus
from training.run import RunDirectory


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """save(step, model) -> the directory of a checkpoint in run/checkpoints."""
    parent = tmp_path / "run" / "checkpoints"
    parent.mkdir(parents=True)
    files = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"a": 1}'}
    rest = {"optimizer": {"a.exp_avg": torch.zeros(3)}, "about": {"certificate": {"causal": "yes"}}}
    return lambda step=5, gpt=None: save_gpt(parent, step, gpt or make_gpt(), files, **rest)


def test_a_model_comes_back_to_the_same_bits(save) -> None:
    gpt = make_gpt(bias=False, n_kv_head=1).eval()  # as no GPT-2 of `transformers`: test_huggingface.py has the others
    loaded = GPT.from_pretrained(save(5, gpt))
    assert loaded.config == gpt.config and not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    for name, tensor in gpt.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    idx = torch.randint(17, (2, 7))
    assert torch.equal(gpt(idx), loaded(idx))
    assert loaded.lm_head.weight is loaded.token_embedding.weight


def test_a_newer_format_is_named(save) -> None:
    directory = save()
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(UserError, match="has format 99, this version reads 3"):
        GPT.from_pretrained(directory)


@pytest.mark.parametrize("number", often(30, 300))
def test_no_damage_is_loaded(save, tmp_path: Path, number: int) -> None:
    """Flipped bits, zeroed blocks and cut ends, over all files of the newest checkpoint: the one before is taken."""
    save(5)
    directory = save(10)
    choose, files = random.Random(number), sorted(directory.iterdir())
    for damage in ("flip", "zero", "cut", "missing"):
        for _ in range(number):
            path = choose.choice(files)
            content = path.read_bytes()
            place = choose.randrange(len(content))
            damaged = bytearray(content)
            if damage == "flip":
                damaged[place] ^= 1 << choose.randrange(8)
            elif damage == "zero":
                damaged[place : place + 4096] = bytes(len(damaged[place : place + 4096]))
            else:
                del damaged[place:]
            path.write_bytes(damaged)
            if damage == "missing":
                path.unlink()
            if damaged != content:  # there may have been zeros
                found = find_checkpoint(tmp_path / "run", to_resume=True).directory.name
                assert found == "step-00000005", f"{damage} in {path.name} at {place}"
            path.write_bytes(content)
    assert find_checkpoint(tmp_path / "run", to_resume=True).directory == directory


def peak_memory(work: Callable[[], object]) -> int:
    """The most bytes of memory that the process had while `work` was done, beyond what it had before."""
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1])
    work()
    return 1024 * (int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) - before)


def measure_saving(directory: Path) -> None:
    """Train for a step, and print the peak of saving as a share of the checkpoint: once, and as from shards."""
    shares, save = [], RunDirectory.save

    def measured(self: RunDirectory, step: int, *rest: object, **options: object) -> None:
        for is_sharded in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if is_sharded:  # which are copied when they meet
                    patch.setattr("training.distributed.is_sharded", lambda tensor: True)
                    patch.setattr("training.distributed.gather_tensor", torch.clone)
                peak = peak_memory(lambda: save(self, step, *rest, **options))
            shares.append(peak / sum(path.stat().st_size for path in step_directories(self.path)[0].iterdir()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.prepare.PREPARED", directory / "prepared")
        patch.setattr(train, "certify", lambda *_, **__: {"causal": "not asked"})
        patch.setattr(train, "prove_loss", lambda *_, **__: {})
        patch.setattr(train, "keep_freed_memory", lambda device: None)  # it would be used again, and not be counted
        patch.setattr(RunDirectory, "save", measured)
        options = {"model__n_embd": 510, "model__n_layer": 5, "train__max_steps": 1, "train__sample_tokens": 0}
        patch.setattr(sys, "argv", ["train.py", *tiny_run(write_corpus(directory), directory / "out", **options)])
        train.main()
    print(json.dumps(shares))


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts a peak from a moment on")
def test_saving_does_not_triple_memory(tmp_path: Path) -> None:
    code = f"from tests.model.test_checkpoint import *; measure_saving(Path({str(tmp_path)!r}))"
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": f"{1 << 17}"}  # a larger tensor goes back when it is freed
    said = run_python("-c", code, env=environment)
    assert said.returncode == 0, said.stderr
    shares = json.loads(said.stdout.splitlines()[-1])
    assert max(shares) <= 1.2, shares
