"""The model card: README.md in a checkpoint, for those who meet the model without its run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from configs import to_toml, visible
from data.corpus import Corpus
from model import GPT
from model.checkpoint import describe_certificate, is_hub_name

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [tril]{base_model}
---

# {name}

{origin} on {source}: {train[tokens]:,} tokens ({train[bytes]:,} bytes), read {epochs:.2f} times in {step:,} steps.
{validation}

Causal: {causal}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIRECTORY OR NAME OF THIS MODEL")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY OR NAME OF THIS MODEL")
output = model.generate(**tokenizer("A text", return_tensors="pt"), do_sample=True, max_new_tokens=50)
print(tokenizer.decode(output[0]))
```

It looks at {context:,} tokens at most. It repeats what is in its text, true or not, and has not been taught to answer.

## How it was made

{seconds:,.0f} seconds of training, with these options (names of files are without their folders):

```toml
{options}```
"""


def model_card(config: Any, model: GPT, corpus: Corpus, state: dict, losses: dict[int, dict], about: dict) -> str:
    """The text of the card.

    config: the tables of the run; losses: the lines of metrics that have a validation loss, by step; about: certificate
    and environment, as in the manifest.
    """
    c, T, base = config.train, config.model.context_length, config.train.init_from
    is_hub = base is not None and is_hub_name(base)
    size = f"{config.model.family} of {sum(p.numel() for p in model.parameters()):,} parameters"
    source = config.data.source if config.data.source.startswith("hf:") else Path(config.data.source).name
    text = "the Python standard library" if source == "stdlib" else source
    made = replace(
        config,
        data=replace(config.data, source=source),
        train=replace(c, out_dir=Path(c.out_dir).name, init_from=base if is_hub or not base else Path(base).name),
    )
    return CARD.format(
        base_model=f"\nbase_model: {base}" if is_hub else "",
        name=Path(c.out_dir).absolute().name,
        origin=f"A {size}, fine-tuned from {made.train.init_from}," if base else f"A {size}, trained from nothing",
        source=visible(text),
        train=corpus.meta["train"],
        epochs=state["step"] * c.batch_size * c.grad_accum_steps * T / corpus.meta["train"]["tokens"],
        step=state["step"],
        validation=" ".join(validation_sentence(step, losses[step]) for step in chosen(state, losses)),
        causal=describe_certificate(about),
        context=T,
        seconds=state["train_seconds"],
        options=to_toml(made),
    )


def chosen(state: dict, losses: dict[int, dict]) -> list[int]:
    """The steps whose losses a reader wants: the latest, and the best if that is another."""
    latest = max(losses, default=None)
    return [step for step in dict.fromkeys((latest, state["best_step"])) if step in losses]


def validation_sentence(step: int, line: dict) -> str:
    loss, bits = line["val_loss"], line["val_bits_per_byte"]
    return f"Validation loss at step {step:,}: {loss:.4f} nats a token, {bits:.4f} bits a byte."
