"""The model card: README.md in a checkpoint, for those who meet the model without its run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from configs import to_toml
from configs.script import visible
from data.corpus import Corpus
from model import GPT
from model.checkpoint import describe_certificate, is_hub_name

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [tril]{base_model}
---

# {config.train.out_dir}

A {config.model.family} of {num_parameters:,} parameters, {origin} on {source}: {text[tokens]:,} tokens
({text[bytes]:,} bytes), read {epochs:.2f} times in {state[step]:,} steps.
{validation}

Causal: {causal}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIRECTORY OR NAME OF THIS MODEL")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY OR NAME OF THIS MODEL")
output = model.generate(**tokenizer("A text", return_tensors="pt"), do_sample=True, max_new_tokens=50)
print(tokenizer.decode(output[0]))
```

It sees {config.model.context_length:,} tokens at most. It repeats its text, true or not: it was not taught to answer.

## How it was made

{state[train_seconds]:,.0f} seconds of training, with these options (names of files without their folders):

```toml
{options}```
"""
LOSS = "Validation loss at step {step:,}: {val_loss:.4f} nats a token, {val_bits_per_byte:.4f} bits a byte."


def model_card(
    config: Any, model: GPT, corpus: Corpus, state: dict, lines: list[dict], best: int | None, about: dict
) -> str:
    """Return the text of the card. It names files without their folders, which would describe the user's machine.

    config: the tables of the run. state: its `step` and `train_seconds`. lines: those of metrics.jsonl; the card names
    the latest validation loss, and that of step `best`. about: certificate and environment, as in the manifest.
    """
    c, text, origin = config.train, corpus.meta["train"], config.data.source
    source = origin if origin.startswith("hf:") else Path(origin).name
    base = c.init_from if not c.init_from or is_hub_name(c.init_from) else Path(c.init_from).name
    train = replace(c, out_dir=Path(c.out_dir).absolute().name, init_from=base)
    public = replace(config, data=replace(config.data, source=source), train=train)
    tokens_read = state["step"] * c.batch_size * c.grad_accum_steps * config.model.context_length
    losses = [line for line in lines if line.get("val_loss") is not None]
    return CARD.format(
        config=public,
        state=state,
        text=text,
        base_model=f"\nbase_model: {base}" if base and is_hub_name(c.init_from) else "",
        num_parameters=sum(p.numel() for p in model.parameters()),
        origin=f"fine-tuned from {base}," if base else "trained from nothing",
        source=visible("the Python standard library" if source == "stdlib" else source),
        epochs=tokens_read / text["tokens"],
        validation=" ".join(LOSS.format(**line) for line in losses if line["step"] in (losses[-1]["step"], best)),
        causal=describe_certificate(about),
        options=to_toml(public),
    )
