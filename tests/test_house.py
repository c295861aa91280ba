"""The house: the imports, no code that executes data, and commands on the pages that exist."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import inspect_attention
import sample
import train
from benchmarks import compare
from cli.options import parse

ROOT = Path(__file__).parent.parent
SCRIPTS = {"train", "sample", "inspect_attention"}
OURS = {"model", "data", "cli", "training", "inspection", *SCRIPTS}
MAY_IMPORT = {  # package -> what it may import of ours, besides itself
    "model": set(),
    "data": {"cli"},
    "cli": set(),
    "errors.py": set(),
    "training": {"model", "data", "cli", "inspection"},
    "inspection": {"model", "data", "cli"},
    **{f"{name}.py": OURS - SCRIPTS for name in SCRIPTS},
}
SOURCES = sorted([*ROOT.glob("*.py"), *(path for name in MAY_IMPORT for path in (ROOT / name).rglob("*.py"))])
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
by_file = pytest.mark.parametrize("file", TREES)


def imports(file: str) -> Iterator[str]:
    """The modules that a file imports, and what it imports from them: `from a import b` gives a and a.b.

    Imports inside functions and for type checkers count, those under `if __name__ == "__main__"` do not.
    """
    as_module = [node for node in TREES[file].body if not ast.unparse(node).startswith("if __name__ ==")]
    for node in (inner for outer in as_module for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(file: str) -> set[str]:
    return {name.split(".")[0] for name in imports(file)}


@by_file
def test_imports_follow_the_arrows(file: str) -> None:
    room = file.split("/")[0]
    assert packages(file) & OURS <= MAY_IMPORT[room] | {room}


def test_no_files_import_each_other() -> None:
    edges = {file: TREES.keys() & {f"{name.replace('.', '/')}.py" for name in imports(file)} for file in TREES}
    while leaves := [file for file, targets in edges.items() if not targets & edges.keys()]:
        for file in leaves:
            del edges[file]
    assert not edges, f"files in a circle of imports, or importing one: {', '.join(edges)}"


def test_attention_can_be_lifted_out() -> None:
    assert packages("model/attention.py") == {"math", "typing", "torch"}


@by_file
def test_nothing_executes_data(file: str) -> None:
    calls = [node for node in ast.walk(TREES[file]) if isinstance(node, ast.Call)]
    called, options = {ast.unparse(call.func) for call in calls}, {word.arg for call in calls for word in call.keywords}
    assert not called & {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
    assert not called & {"torch.load", "torch.save", "torch.hub.load", "yaml.load", "shutil.unpack_archive"}
    assert not options & {"shell", "allow_pickle", "trust_remote_code", "weights_only"}
    assert not packages(file) & {"pickle", "dill", "shelve", "marshal", "runpy", "tarfile", "zipfile", "subprocess"}


def documented_commands() -> list[str]:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]
    blocks = [block for page in pages for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page, re.DOTALL)]
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]
    return list(dict.fromkeys(lines))


def check_torchrun(words: list[str]) -> None:
    """Parse the options of train.py, and check that this many ranks can share a step."""
    script = words.index("train.py")
    options = dict(word.split("=") for word in words[:script])
    config = train.read_config(words[script + 1 :])
    world = int(options["--nproc_per_node"]) * int(options.get("--nnodes", "1"))
    assert config.train.grad_accum_steps % world == 0


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_exist(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: True)  # the directory of an output is made by a run
    words = [word for word in shlex.split(command, comments=True) if word != "--help"]
    parsed = {"train.py": train.Config, "sample.py": sample.Options, "inspect_attention.py": inspect_attention.Options}
    parsed["benchmarks/compare.py"] = compare.Options
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[0] == "torchrun":
        check_torchrun(words[1:])
    elif words[0] == "sbatch":
        assert (ROOT / words[1]).is_file()
        parse(train.Config, words[2:])
    elif words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / path).is_file() for path in words[3:])
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / Path(*words[2].split("."))).with_suffix(".py").is_file()
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
        if words[1] in parsed:
            parse(parsed[words[1]], words[2:])
        assert all((ROOT / word).is_file() for word in words[2:] if re.fullmatch(r"configs/\S+\.toml", word))
    elif words[0] == "lm_eval":
        assert (ROOT / words[-1] / f"{words[words.index('--tasks') + 1]}.yaml").is_file()
    else:
        assert words[0] in {"git", "cd", "curl", "export", "pip", "python3", "source", ".", "hf", "wandb"}, command
