"""The proof of the proof, by machine: change one token of the source at a time, and see whether the tests notice.

    python -m tests.source_mutants                      the layer, its cache and the model
    python -m tests.source_mutants model/causality.py   another file

Each mutant is imported in a process of its own, forked from this one after the slow imports; the tests run until one
fails. What survives is printed, and is an error. EQUIVALENT says which mutants change nothing that a test could notice:
they are printed with the reason, and not tried, which would take as long as all tests.
"""

import ast
import contextlib
import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FILES = ("model/attention.py", "model/cache.py", "model/gpt.py", "model/families.py")
TESTS = ("attention", "families", "huggingface", "leakage", "capture", "gpt", "generate", "checkpoint", "causality")
SECONDS = 600  # a mutant may run for ever; that is noticed too

# line -> what it may become, and why no test can notice.
EQUIVALENT = {
    "end = self.length + k.size(2)": {"end = self.length + v.size(2)": "keys and values have the same length"},
    "rows, places = torch.arange(k.size(0), device=k.device), self.position.flatten()": {
        "rows, places = torch.arange(v.size(0), device=k.device), self.position.flatten()": "as many keys as values",
        "rows, places = torch.arange(k.size(0), device=v.device), self.position.flatten()": "both are on one device",
        "rows, places = torch.arange(k.size(0), ), self.position.flatten()": "tests run on the CPU, as by default",
    },
    "scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))": {
        "scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))": "queries and keys have the same width",
        "scores = q @ k.transpose(2, -1) / math.sqrt(q.size(-1))": "of four dimensions, 2 is the same as -2",
    },
    "square = q.size(-2) == k.size(-2)": {
        "square = q.size(2) == k.size(-2)": "of four dimensions, 2 is the same as -2",
        "square = q.size(-2) == k.size(2)": "of four dimensions, 2 is the same as -2",
    },
    "mask = self.causal_mask[positions, : k.size(-2)]  # the rows of the triangle that belong to x": {
        "mask = self.causal_mask[positions, : k.size(2)]  # the rows of the triangle that belong to x": (
            "of four dimensions, 2 is the same as -2"
        ),
    },
    "with torch.autocast(x.device.type, enabled=False):  # on CUDA it returns float32, from PyTorch 2.12 on": {
        "with torch.autocast(x.device.type, ):  # on CUDA it returns float32, from PyTorch 2.12 on": (
            "autocast changes this norm on CUDA alone"
        ),
        "with torch.autocast(x.device.type, enabled=True):  # on CUDA it returns float32, from PyTorch 2.12 on": (
            "autocast changes this norm on CUDA alone"
        ),
    },
    "x = checkpoint(block, x, use_reentrant=False) if again else block(x, cache)": {
        "x = checkpoint(block, x, use_reentrant=True) if again else block(x, cache)": (
            "both ways compute again what was not kept"
        ),
    },
    "for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):": {
        "for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), ):": (
            "the two have the same length, and strict says so"
        ),
        "for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=False):": (
            "the two have the same length, and strict says so"
        ),
    },
    "return [torch.cat(row) for row in zip(idx, *new, strict=True)]": {
        "return [torch.cat(row) for row in zip(idx, *new, )]": ("the two have the same length, and strict says so"),
        "return [torch.cat(row) for row in zip(idx, *new, strict=False)]": (
            "the two have the same length, and strict says so"
        ),
    },
    "if not missing or x.numel() <= multiple * x.size(-1):": {
        "if not missing or x.numel() <= multiple * x.size(1):": (
            "both are the same product, and one is faster for many rows"
        ),
    },
    "nn.init.ones_(parameter)": {"pass": "LayerNorm begins with ones anyway"},
    "use_cache: bool = True,": {"use_cache: bool = False,": "the cache changes the speed alone"},
    "super()._apply(fn, recurse)": {
        "super()._apply(fn, fn)": "a function is as true as recurse, which nobody sets to False"
    },
    "logits = padded_linear(hidden, self.lm_head.weight) if hidden.is_cuda else self.lm_head(hidden)": {
        "logits = (self.lm_head(hidden) if hidden.is_cuda else padded_linear(hidden, self.lm_head.weight))": (
            "both are the same product, and one is faster on a GPU"
        ),
    },
}

COMPARISONS = {ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
COMPARISONS |= {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*", ast.Pow: "*"}
OPERATORS |= {ast.BitAnd: "|", ast.BitOr: "&"}


class Change(NamedTuple):
    """One change of a source: the place, and what to put there."""

    function: str
    line: int
    start: int
    end: int
    new: str


def changes(source: str) -> Iterator[Change]:
    """All changes of one token (or one short phrase) inside the functions of a source."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def change(node: ast.AST, new: str, start: int | None = None, end: int | None = None) -> Change:
        first = lines[node.lineno - 1] + node.col_offset if start is None else start
        last = lines[node.end_lineno - 1] + node.end_col_offset if end is None else end
        return Change(function.name, node.lineno, first, last, new)

    def at(node: ast.AST) -> tuple[int, int]:
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def text(node: ast.AST) -> str:
        return ast.get_source_segment(source, node)

    for function in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]:
        names = sorted({argument.arg for argument in function.args.args} - {"self", "cls"})
        for node in walk_code(function):
            if isinstance(node, ast.Compare):
                new = COMPARISONS[type(node.ops[0])]
                yield change(node, f" {new} ", at(node.left)[1], at(node.comparators[0])[0])
            elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
                yield change(node, f"({text(node.left)}) {OPERATORS[type(node.op)]} ({text(node.right)})")
            elif isinstance(node, ast.UnaryOp):
                yield change(node, text(node.operand))
            elif isinstance(node, ast.BoolOp):
                new = " or " if isinstance(node.op, ast.And) else " and "
                yield change(node, f"({new.join(text(value) for value in node.values)})")
            elif isinstance(node, ast.IfExp):
                yield change(node, f"({text(node.orelse)} if {text(node.test)} else {text(node.body)})")
            elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
                yield change(node, str(not node.value))
            elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
                yield change(node, repr(node.value + 1))
            elif isinstance(node, ast.Constant) and node.value is None:
                pass
            elif isinstance(node, ast.keyword) and node.arg:
                yield change(node.value, "", lines[node.lineno - 1] + node.col_offset)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and len(names) > 1:
                yield change(node, names[(names.index(node.id) + 1) % len(names)])
            elif isinstance(node, ast.Expr | ast.AugAssign) or (
                isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
            ):
                yield change(node, "pass")
            elif isinstance(node, ast.If):
                yield change(node.test, f"(not ({text(node.test)}))")


def walk_code(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes that run: no annotations, decorators, docstrings or messages, and no functions inside, which come by
    themselves."""
    pending: list[ast.AST] = [*function.body, *function.args.defaults]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Raise | ast.FunctionDef | ast.JoinedStr):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        yield node
        pending += ast.iter_child_nodes(node)


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from another source."""

    def __init__(self, path: Path, source: bytes):
        self.name, self.path, self.source = ".".join(path.relative_to(ROOT).with_suffix("").parts), path, source

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, origin=str(self.path)) if name == self.name else None

    def get_filename(self, name: str) -> str:
        return str(self.path)

    def get_data(self, path: str) -> bytes:
        return self.source

    def path_stats(self, path: str) -> dict:
        raise OSError("no cache")


def survives(path: Path, source: bytes) -> bool:
    """Whether all tests pass with this source in the place of the file."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(SECONDS)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            sys.meta_path.insert(0, Mutated(path, source))
            arguments = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
            arguments += ["-m", "not long", "-k", "not compiled"]  # which compiles every mutant anew
            nearest = path.stem if path.stem in TESTS else "generate"  # alone at first: most is noticed there
            for names in ([nearest], [name for name in TESTS if name != nearest]):
                code = pytest.main(arguments + [str(ROOT / "tests" / f"test_{name}.py") for name in names])
                if code != 0:
                    break
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


class Mutant(NamedTuple):
    """A source with one change."""

    change: Change
    becomes: str  # the line
    reason: str | None  # why no test can notice
    source: bytes


def mutants(source: bytes) -> Iterator[Mutant]:
    """All that are Python."""
    for change in changes(source.decode()):
        mutated = source[: change.start] + change.new.encode() + source[change.end :]
        with contextlib.suppress(SyntaxError):
            compile(mutated, "<mutant>", "exec")
            line, becomes = (text.decode().splitlines()[change.line - 1].strip() for text in (source, mutated))
            yield Mutant(change, becomes, EQUIVALENT.get(line, {}).get(becomes), mutated)


def survivors(path: Path) -> tuple[int, list[Mutant]]:
    """The number of mutants of a file, and those that no test notices."""
    source = path.read_bytes()
    if not survives(path, source):
        sys.exit(f"the tests fail on {path} as it is")
    found = list(mutants(source))
    others_at_work = "PYTEST_XDIST_WORKER" in os.environ
    with ThreadPoolExecutor(1 if others_at_work else os.cpu_count()) as pool:
        alive = pool.map(lambda mutant: mutant.reason is not None or survives(path, mutant.source), found)
        return len(found), [mutant for mutant, living in zip(found, alive, strict=True) if living]


def report(names: Iterable[str]) -> int:
    """Print what survives in each file; return the number of those that no reason explains."""
    unexplained = 0
    for name in names:
        number, living = survivors(ROOT / name)
        print(f"{name}: {number} mutants, {number - len(living)} killed", flush=True)
        for change, becomes, reason, _ in living:
            unexplained += reason is None
            what = f"{change.function}, line {change.line}, {change.new.strip()!r}: {becomes}"
            print(f"  {what}: {reason or 'unexplained'}", flush=True)
    return unexplained


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo  # noqa: F401
    import tyro  # noqa: F401
    from transformers.models.gpt2 import modeling_gpt2  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401
    from transformers.models.nanochat import modeling_nanochat  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    sys.exit(bool(report(sys.argv[1:] or FILES)))
