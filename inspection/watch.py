"""The heads of a model in training: a few numbers at each evaluation, and a picture at the end."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inspection.heads import repeat_probe
from inspection.patterns import Captured, capture
from inspection.plots import mosaic
from model import GPT

LONGEST = 256  # tokens, which cost nothing beside the steps between two evaluations


class HeadWatch:
    """One window of validation text, and one probe of its tokens, which the heads are seen on again and again."""

    def __init__(self, tokens: np.ndarray, start: Sequence[int], context_length: int):
        """tokens: (n,) validation ids; start: the ids between two documents, the last of which begins one."""
        self.text = torch.from_numpy(tokens[: min(context_length, LONGEST)].astype(np.int64))[None]
        words = torch.from_numpy(np.setdiff1d(tokens, start).astype(np.int64))
        self.probe = repeat_probe(words, (start or words.tolist())[-1], context_length, num=1)

    def scores(self, model: GPT) -> dict[str, list[list[float | None]]]:
        """Metric -> L rows of H numbers, for JSON: four digits, None for what cannot be measured."""
        found = self.look(model, self.text).measured(picture=False)
        if self.probe is not None:
            for sequences, suffix in ((self.probe.repeated, ""), (self.probe.control, "_control")):
                scores = self.look(model, sequences).measured(self.probe.repeat, picture=False)
                found |= {f"{name}{suffix}": scores[name] for name in ("duplicate", "induction")}
        rows = {name: values[0].round(decimals=4).tolist() for name, values in found.items()}
        return {name: [[x if math.isfinite(x) else None for x in row] for row in of] for name, of in rows.items()}

    def picture(self, model: GPT) -> np.ndarray:
        """Every head on the text, (height, width) uint8: white for a weight of 0, black for 1.

        Raises NotTheKernels if the weights are not those that the kernel used.
        """
        att = self.look(model, self.text)
        att.verify()
        heads = [(layer, head) for layer in range(att.n_layer) for head in range(att[layer][0].size(1))]
        canvas, _, _ = mosaic(heads, lambda head: att.pattern(*head)[0].cpu(), self.text.size(1))
        return (255 * (1 - canvas.nan_to_num(0))).byte().numpy()

    @staticmethod
    @torch.no_grad()
    def look(model: GPT, idx: Tensor) -> Captured:
        """Run the model in eval mode."""
        was_training = model.training
        model.eval()
        try:
            with capture(model) as att:
                model.hidden(idx.to(model.lm_head.weight.device))
        finally:
            model.train(was_training)
        return att
