"""Validation: the loss on text that is not trained on, a sample, and scores of the heads."""

import math
from itertools import takewhile

import numpy as np
import torch

from cli.script import printable
from data.batches import validation_batches
from data.corpus import Corpus
from errors import UserError
from model import GPT
from model.device import autocast
from training.certificate import LossFn
from training.config import TrainConfig
from training.distributed import Ranks
from tril.decoder import evaluating
from tril.experiments import head_scores, make_probe
from tril.weights import NotTheKernels, summarise

MOST_SCORED = 256  # tokens of text on which heads are scored, which costs little beside the loss
MOST_PROBED = 512  # tokens that each checkpoint names, for the same probe in an inspection


class Validation:
    """Evaluation of a model in training, always on the same text and with the same random numbers.

    Args:
        corpus: has the validation text and the tokenizer.
        config: the [train] table; eval_tokens, batch_size, sample_prompt and sample_tokens are used.
        context_length: T.
        dtype: the precision of matrix products.
        ranks: share the batches of the loss; all of them call each method.

    Attributes:
        probe_tokens: tokens of the validation text to draw the probe of heads from, at most MOST_PROBED, evenly spread.
    """

    def __init__(self, corpus: Corpus, config: TrainConfig, context_length: int, dtype: torch.dtype, ranks: Ranks):
        self.config = config
        self.T = context_length
        self.dtype = dtype
        self.ranks = ranks
        self.tokens = corpus.tokens["val"][: config.eval_tokens + 1]
        self.tokenizer = corpus.tokenizer
        val = corpus.meta["val"]
        self.bits_per_byte_per_nat = val["tokens"] / val["bytes"] / math.log(2)
        text = []
        try:
            text = self.tokenizer.encode(config.sample_prompt).tolist()
        except UserError as error:  # a configuration may have the prompt of another text
            print(f"note: samples begin a document, since train.sample_prompt cannot: {error}")
        # A tokenizer need not have a token that begins a text.
        self.prompt = [*self.tokenizer.document_start, *text] or self.tokens[:1].tolist()
        text = self.tokens[:context_length][:MOST_SCORED]
        self.text = torch.from_numpy(text.astype(np.int64))[None]
        seen = np.unique(self.tokens)
        self.probe_tokens = seen[np.linspace(0, len(seen) - 1, min(len(seen), MOST_PROBED), dtype=int)]
        special = self.tokenizer.special_tokens.values()
        self.probe = make_probe(self.probe_tokens, special, self.tokenizer.document_start, context_length)

    def evaluate(self, model: GPT, loss_fn: LossFn) -> dict:
        """Return a record for metrics.jsonl: val_loss, val_bits_per_byte, heads and, if wanted, a sample.

        "heads_proof" says how their weights were proved. If they are not the kernel's, or cannot be seen, there are no
        heads, and it says why: a run goes on without them.
        """
        val_loss = self.loss(model, loss_fn)
        record = {"val_loss": val_loss, "val_bits_per_byte": val_loss * self.bits_per_byte_per_nat}
        try:
            with autocast(model.device, self.dtype):
                scores = head_scores(model, self.text, self.probe)
            heads = {name: mean.numpy().round(4).tolist() for name, mean in scores.mean.items()}  # L rows of H numbers
            record |= {"heads": heads, "heads_proof": summarise(scores.proofs)}
        except (NotTheKernels, UserError) as error:
            record["heads_proof"] = f"heads are left out: {error}"
        if self.config.sample_tokens:
            record["sample"] = self.sample(model, self.config.sample_tokens)
        return record

    @torch.no_grad()
    def loss(self, model: GPT, loss_fn: LossFn) -> float:
        """Return the mean loss over all validation tokens, in nats a token."""
        ranks = self.ranks
        batches = validation_batches(self.tokens, self.config.batch_size, self.T, model.device, ranks.rank, ranks.world)
        with evaluating(model):
            losses = [loss_fn(model, inputs, targets) for inputs, targets in batches]
        # fsum is exact, so the sum does not depend on which rank has computed which batch.
        return math.fsum(ranks.collect(losses).tolist()) / (len(self.tokens) - 1)

    def sample(self, model: GPT, num_tokens: int) -> str:
        """Return the prompt as the model continues it, up to the end of the document."""
        idx = torch.tensor([self.prompt], device=model.device)
        with autocast(idx.device, self.dtype):
            (tokens,) = model.generate(idx, num_tokens, temperature=0.8, top_k=50, seed=0).tolist()
        text = tokens[len(self.tokenizer.document_start) :]
        return self.tokenizer.decode([*takewhile(lambda token: token not in self.tokenizer.ends, text)])

    def print_sample(self, model: GPT) -> None:
        """Print a longer sample for the end of a run, if samples are wanted."""
        if self.config.sample_tokens:
            print(f"\nA sample of what it writes:\n{printable(self.sample(model, 3 * self.config.sample_tokens))}\n")
