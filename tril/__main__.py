"""Ask from the command line whether a position of a language model depends on a later token.

    python -m model.check openai-community/gpt2        a name on the Hugging Face hub, or a model directory
    python -m model.check path/to/file.py:factory      a callable in a file, which returns a model

Prints a sentence, and exits with 0 (none does), 1 (one does) or 2 (no answer, and why).
"""

import argparse
import importlib
import sys
from functools import partial
from pathlib import Path

import torch
from inspection.foreign import load_decoder
from torch import nn

from model import GPT
from tril.causality import check_causality, logits_of


def make_model(name: str) -> nn.Module:
    """Return the model that the command line names."""
    place, _, factory = name.rpartition(":")
    if not place.endswith(".py"):
        return load_decoder(name)
    path = Path(place)
    sys.path.insert(0, str(path.parent))
    # The file and its neighbours may have names of ours, such as model.py.
    for loaded in [module for module in sys.modules if module.partition(".")[0] in ("model", "errors", "files")]:
        del sys.modules[loaded]
    return getattr(importlib.import_module(path.stem), factory)()


from training.certificate import read_in_parts


def main() -> None:
    """Probe a model. Exits with 2 and a sentence if a factory or a model fails, however it does."""
    parser = argparse.ArgumentParser(description="Check that no position of a language model depends on a later token.")
    parser.add_argument("model", help="a directory, OWNER/NAME on the hub, or file.py:factory")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text; default: %(default)s")
    options = parser.parse_args()
    try:
        model = make_model(options.model)
        with torch.no_grad():
            logits = logits_of(model(torch.zeros(1, options.length, dtype=torch.int64)))
        ours = {}
        if isinstance(model, GPT):
            ours = {"decode": partial(read_in_parts, model), "mask": model.receptive_field}
        report = check_causality(model, logits.size(-1), options.length, **ours)
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        parser.exit(2, f"{options.model}, reading {options.length} tokens (--length): {reason}\n")
    print(report)
    sys.exit(not report.ok)


if __name__ == "__main__":
    main()
