"""See the attention of any decoder, and prove that it sees no future.

    import tril

    report = tril.check_causality(model)                    # does a position depend on a later token?
    tril.assert_causal(model)                               # the same for a test: AssertionError with the sentence
    inspection = tril.inspect_heads(model, ids, names)      # where its heads look; a notebook shows it as a page
    inspection.save("heads.html")                           # or .png, .svg, .npz
    with tril.capture(model) as att:                        # the attention of a model that you run yourself
        model(idx)

    from tril.look import look
    att, logits = look(model, idx, {(5, 1): torch.zeros_like}, slice(None))  # (B, T) read without head 5.1: all logits

From a shell, in any folder, where mine.py has a function make() that returns a model:

    python -m tril check mine.py:make
    python -m tril heads mine.py:make --ids "1 2 3" -o heads.html

In place of mine.py:make both take a directory or OWNER/NAME of the Hugging Face hub, which transformers opens.

The model is an nn.Module that reads token ids. How it is called is found by calling it: vocabulary, length, further
arguments, and where the logits are. If it is not found, one sentence gives the line to write, call=lambda ids: ...

    report.ok           whether each position sees all tokens up to itself, and none after; str(report) says which not
    report.call         how the model was called, as "called as model(ids, targets=ids)[0]"

    inspection.table()           a line for each head and for each kind of head; print(inspection) has all in words
    inspection.verified          how the weights were verified, and what is not shown
    inspection.pattern(5, 1)     the weights of head 5.1, (T, T): row = query, column = key; layers and heads from zero
    inspection.places(5, 1)      where it looks in a long text, given as corpus=
    inspection.why(5, 1, 9, 4)   why token 9 looks at token 4: who wrote what makes it do so
    inspection.scores.mean       metric -> (layers, heads); inspection.scores.losses: of the texts
    inspection.upstream          head -> the heads of earlier layers that it needs
    inspection.logit_attribution, .value_norms    head -> what it adds to logits, and norms of its projected values
    inspection.influence         (T, T), how much tokens influence predictions
    inspection.att               what was captured: att.pattern(5, 1), att.verify(), att.scores(), att.left_out

names: a list with a name for each token, an encoding of tiktoken, or a tokenizer of transformers or tokenizers; with
one of these the text may be a string. `UserError` is a mistake that you can mend, in one sentence. `NotTheKernels`
says that computed weights are not those of the kernel. torch, numpy and tqdm are imported; jinja2 and matplotlib when
they are used. tril/causality.py needs torch alone, and can be copied.
"""

from importlib import import_module

OFFERED = {
    "Comparison": "comparison",
    "compare": "comparison",
    "assert_causal": "decoder",
    "check_causality": "decoder",
    "find_call": "decoder",
    "UserError": "errors",
    "ablate": "experiments",
    "head_scores": "experiments",
    "influence": "experiments",
    "repeat_probe": "experiments",
    "Inspection": "inspection",
    "inspect_heads": "inspection",
    "Captured": "look",
    "capture": "look",
    "NotTheKernels": "weights",
}


def __getattr__(name: str) -> object:
    """Return what the package offers. Its file is loaded when it is asked for: errors.py needs no torch."""
    if name not in OFFERED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{OFFERED[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *OFFERED})
