"""Our families beside `transformers`: the largest differences of logits and attention, and of greedy text.

    python benchmarks/parity.py

Models of about ten million random parameters, saved as a checkpoint and opened there, in float32.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from data.tokenizer import FILES, make_tokenizer, save_tokenizer
from inspection import capture
from model import GPT, GPTConfig
from model.checkpoint import save_checkpoint

SHAPES = {
    "gpt2": {"n_layer": 6, "n_head": 6, "n_embd": 384},
    "llama": {"n_layer": 6, "n_head": 6, "n_kv_head": 2, "n_embd": 384, "rope_scaling": (8.0, 1.0, 4.0, 64)},
    "qwen3": {"n_layer": 6, "n_head": 6, "n_kv_head": 2, "n_embd": 384, "head_dim": 48},
    "nanochat": {"n_layer": 6, "n_head": 6, "n_embd": 384},
}


@torch.no_grad()
def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print("| family | parameters | logits, relative | attention weights | kernel's weights | same greedy text |")
    print("|---|---|---|---|---|---|")
    for family, shape in SHAPES.items():
        torch.manual_seed(0)
        ours = GPT(GPTConfig(family=family, context_length=256, vocab_size=1009, **shape)).eval()
        for matrix in (parameter for parameter in ours.parameters() if parameter.dim() == 2):
            matrix.mul_(2)  # freshly made, a model attends to everything alike
        with TemporaryDirectory() as name:
            directory = Path(name)
            save_tokenizer(make_tokenizer("bytes", []), directory)
            files = {file: (directory / file).read_bytes() for file in FILES}
            checkpoint = save_checkpoint(directory, 1, ours.config, ours.state_dict(), {}, (256, 256), files, {}, {})
            theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").eval()
        idx = torch.randint(1009, (4, 256))
        with capture(ours) as att:
            logits = ours(idx)
        expected = theirs(idx, output_attentions=True)
        relative = (logits - expected.logits).abs().max() / expected.logits.abs().max()
        pairs = enumerate(expected.attentions)
        attention = max((att.patterns(layer) - weights).abs().max() for layer, weights in pairs)
        theirs.generation_config.eos_token_id = None
        prompt = idx[:, :16]
        text = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=100, do_sample=False)
        same = torch.equal(ours.generate(prompt, 100, temperature=0), text)
        number = sum(parameter.numel() for parameter in ours.parameters())
        kernel = max(att.verify().values())
        figures = f"{relative:.1e} | {attention:.1e} | {kernel:.1e}"
        print(f"| {family} | {number:,} | {figures} | {'yes' if same else 'no'} |")


if __name__ == "__main__":
    main()
