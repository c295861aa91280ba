"""Checkpoints of released formats open for ever.

`python -m tests.model.test_golden` writes one in the present format.
"""

import json
from pathlib import Path

import pytest
import torch

from data.tokenizer import load_tokenizer
from model import GPT, GPTConfig
from model.checkpoint import FORMAT, verify

GOLDEN = Path(__file__).parent / "golden"
IDX = torch.tensor([[256, 104, 101, 121, 33]])


@pytest.mark.parametrize("directory", sorted(GOLDEN.glob("format-*")), ids=lambda path: path.name)
def test_a_checkpoint_of_a_released_format_gives_its_logits(directory: Path) -> None:
    checkpoint = next(directory.glob("step-*"))
    verify(checkpoint)
    expected = torch.tensor(json.loads((directory / "logits.json").read_text()))
    torch.testing.assert_close(GPT.from_pretrained(checkpoint)(IDX)[0, -1], expected, rtol=0, atol=1e-6)
    assert load_tokenizer(checkpoint).encode("hey!").tolist() == IDX[0, 1:].tolist()


def test_the_present_format_is_among_them() -> None:
    assert (GOLDEN / f"format-{FORMAT}").is_dir()


if __name__ == "__main__":
    from data.tokenizer import make_tokenizer
    from tests.conftest import save_gpt

    torch.manual_seed(0)
    directory = GOLDEN / f"format-{FORMAT}"
    directory.mkdir(parents=True)
    gpt = GPT(GPTConfig(n_layer=2, n_head=3, n_embd=6, context_length=7, vocab_size=257)).eval()
    about = {"certificate": {"causal": "not asked"}, "environment": {"torch": torch.__version__}}
    rest = {"optimizer": {"token_embedding.weight.step": torch.ones(())}, "trainer": {"state": "of a run"}}
    save_gpt(directory, 3, gpt, make_tokenizer("bytes", []).files, about=about, **rest)
    (directory / "logits.json").write_text(json.dumps(gpt(IDX)[0, -1].tolist()))
