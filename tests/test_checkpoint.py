"""Checkpoints: what is saved comes back, damage is named, and other people's tools find what they expect."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from errors import UserError
from model import GPT
from model.checkpoint import find_checkpoint, step_directories, verify
from tests.conftest import make_gpt, often, save_gpt
from training.save import keep_newest


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


def test_damage_is_named(save) -> None:
    directory = save()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="model.safetensors.* is damaged: its size or SHA-256 is not the one in"):
        GPT.from_pretrained(directory)
    path.unlink()
    with pytest.raises(UserError, match="has no 'model.safetensors'"):
        GPT.from_pretrained(directory)


def test_a_newer_format_is_named(save) -> None:
    directory = save()
    manifest = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(UserError, match="has format 99, this version reads 3"):
        verify(directory)


def test_what_does_not_belong_to_a_checkpoint_is_named(save, tmp_path: Path) -> None:
    directory = save()
    (directory / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="has 'notes.txt', which is not in the manifest: it does not belong there"):
        verify(directory)
    (directory / "notes.txt").rename(directory / "README.md")  # a model card, which people may write and edit
    verify(directory)
    outside = (directory / "trainer.json").rename(tmp_path / "outside.json")
    (directory / "trainer.json").symlink_to(outside)
    with pytest.raises(UserError, match="trainer.json', which is not a file of this directory"):
        verify(directory)


@pytest.mark.parametrize("number", often(30, 300))
def test_no_damage_is_loaded(save, tmp_path: Path, number: int, figure: Callable) -> None:
    """Flipped bits, zeroed blocks and cut ends, over all files of the newest checkpoint: the one before is taken."""
    save(5)
    directory = save(10)
    choose, files = random.Random(number), sorted(directory.iterdir())
    for damage in ("flip", "zero", "cut"):
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
            if damaged != content:  # there may have been zeros
                assert find_checkpoint(tmp_path / "run").directory.name == "step-00000005", (
                    f"{damage} in {path.name} at {place}"
                )
            path.write_bytes(content)
    assert find_checkpoint(tmp_path / "run").directory == directory
    figure(f"{3 * number} damaged files of a checkpoint: all refused, the one before taken")


def test_a_step_that_is_saved_again_replaces_the_old_one(save) -> None:
    save(5)
    newer = make_gpt()
    assert torch.equal(GPT.from_pretrained(save(5, newer)).final_norm.weight, newer.final_norm.weight)


def test_old_checkpoints_go_and_the_best_and_later_ones_stay(save) -> None:
    for step in (3, 5, 10, 15, 20, 25):
        parent = save(step).parent
    (parent / "notes").mkdir()
    keep_newest(step_directories(parent), 20, 2, best_step=5)
    left = sorted(path.name for path in parent.iterdir())
    assert left == ["notes", "step-00000005", "step-00000015", "step-00000020", "step-00000025"]
