"""The house: the imports, no code that executes data, and commands on the pages that exist."""

import ast
import math
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import inspect_attention
import sample
import train
from benchmarks import compare
from cli.options import parse
from tests.conftest import ROOT, hold

SCRIPTS = {"train", "sample", "inspect_attention"}
OURS = {"model", "data", "cli", "training", "inspection", *SCRIPTS}
MAY_IMPORT = {  # package -> what it may import of ours, besides itself
    "model": set(),
    "data": {"cli"},
    "cli": set(),
    "cores.py": set(),
    "errors.py": set(),
    "files.py": set(),
    "training": {"model", "data", "cli", "inspection"},
    "inspection": {"model", "data", "cli"},
    **{f"{name}.py": OURS - SCRIPTS for name in SCRIPTS},
}
SOURCES = sorted([*ROOT.glob("*.py"), *(path for name in MAY_IMPORT for path in (ROOT / name).rglob("*.py"))])
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
LINES = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
by_file = pytest.mark.parametrize("file", TREES)


def imports(file: str, in_functions: bool = True) -> Iterator[str]:
    """The modules that a file imports, and what it imports from them: `from a import b` gives a and a.b.

    Imports inside functions and for type checkers count, those under `if __name__ == "__main__"` do not.
    """
    as_module = [node for node in TREES[file].body if not ast.unparse(node).startswith("if __name__ ==")]
    local = [node for node in ast.walk(TREES[file]) if isinstance(node, ast.FunctionDef)]
    skipped = [] if in_functions else [inner for outer in local for inner in ast.walk(outer)]
    for node in (inner for outer in as_module for inner in ast.walk(outer)):
        if isinstance(node, ast.Import) and node not in skipped:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            assert node.level == 0, f"{file}: a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(file: str) -> set[str]:
    return {name.split(".")[0] for name in imports(file)}


# file -> the files that it imports. An import inside a function may close a circle: it is made when all are loaded.
EDGES = {
    file: TREES.keys()
    & {f"{name.replace('.', '/')}{end}" for name in imports(file, False) for end in (".py", "/__init__.py")}
    for file in TREES
}


@by_file
def test_imports_follow_the_arrows(file: str) -> None:
    """All may import errors.py and files.py, which are no rooms."""
    room = file.split("/")[0]
    assert packages(file) & OURS <= MAY_IMPORT[room] | {room}


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_script_sets_how_threads_wait_before_torch_is_loaded(script: str) -> None:
    names = list(imports(f"{script}.py"))
    assert {*names[: names.index("cores")]} <= sys.stdlib_module_names


def test_no_files_import_each_other() -> None:
    edges = dict(EDGES)
    while leaves := [file for file, targets in edges.items() if not targets & edges.keys()]:
        for file in leaves:
            del edges[file]
    assert not edges, f"files in a circle of imports, or importing one: {', '.join(edges)}"


@pytest.mark.parametrize("file", ["model/attention.py", "model/causality.py"])
def test_a_file_that_can_be_lifted_out_imports_torch_alone(file: str) -> None:
    assert packages(file) - {"torch"} <= sys.stdlib_module_names


def reached(file: str) -> set[str]:
    """The files that a file imports, directly or not, and itself."""
    found, new = set(), {file}
    while new:
        found |= new
        new = {target for each in new for target in EDGES[each]} - found
    return found


def test_the_model_needs_little_else() -> None:
    core = reached("model/gpt.py")
    names = ("causality", "check", "checkpoint", "device", "foreign", "huggingface", "load", "packed")
    assert not core & {f"model/{name}.py" for name in names}
    lines = sum(LINES[file] for file in core)
    hold(len(core) <= 8 and lines <= 750, f"model/gpt.py reaches {len(core)} files and {lines} lines, ours 7 and 750")


def counted(readme: str) -> str:
    """README.md with the line counts as they are now."""
    core = reached("model/gpt.py") - {"errors.py"} | {"train.py"}
    readme = re.sub(r"(?<=\[)(\S+\.py)(\]\(\1\), )\d+ lines", lambda m: f"{m[1]}{m[2]}{LINES[m[1]]} lines", readme)
    readme = re.sub(r"(?<=read these )\d+ lines", f"{sum(LINES[file] for file in core)} lines", readme)

    def count(found: re.Match) -> str:
        number = sum(lines for file, lines in LINES.items() if file == found[1] or file.startswith(found[1]))
        return f"{found[1]}{number:{len(found[2])},}"

    return re.sub(r"^(\w+/|\w+\.py)( +[\d,]+)(?=  )", count, readme, flags=re.MULTILINE)


def test_readme_counts_lines_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = {"errors.py", *re.findall(r"^\d\. \[(\S+\.py)\]", readme, re.MULTILINE)}
    hold(listed == reached("model/gpt.py") | {"train.py"}, "README lists other files to read")
    hold(readme == counted(readme), "README counts other lines: python -m tests.scripts.test_house writes them anew")


@by_file
def test_nothing_executes_data(file: str) -> None:
    calls = [node for node in ast.walk(TREES[file]) if isinstance(node, ast.Call)]
    called, options = {ast.unparse(call.func) for call in calls}, [word for call in calls for word in call.keywords]
    assert not called & {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
    assert not called & {"torch.load", "torch.save", "torch.hub.load", "yaml.load", "shutil.unpack_archive"}
    assert not {word.arg for word in options} & {"shell", "allow_pickle", "weights_only"}
    assert {ast.unparse(word.value) for word in options if word.arg == "trust_remote_code"} <= {"False"}
    assert not packages(file) & {"pickle", "dill", "shelve", "marshal", "runpy", "tarfile", "zipfile", "subprocess"}


def documented_commands() -> list[str]:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]
    added = {name for page in pages for name in re.findall(r"^\+    (\w+): ", page, re.MULTILINE)}  # options, by diffs
    pages = [re.sub(rf" --\w+\.({'|'.join(added)}) \S+", "", page) for page in pages]
    blocks = [block for page in pages for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page, re.DOTALL)]
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_exist(command: str) -> None:
    words = [word for word in shlex.split(command, comments=True) if word != "--help"]
    parsed = {"train.py": train.Config, "sample.py": sample.Options, "inspect_attention.py": inspect_attention.Options}
    parsed["benchmarks/compare.py"] = compare.Options
    others = "git cd curl export pip uv python3 source . hf wandb lm_eval sbatch grep".split()
    script = words.index("train.py") if words[0] == "torchrun" else 1
    if words[0] == "make":
        assert set(words[1:]) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    elif words[0] == "torchrun":  # this many ranks can share a step
        ranks = math.prod(int(word.split("=")[1]) for word in words[1:script] if word.startswith("--n"))
        assert train.read_config(words[script + 1 :]).train.grad_accum_steps % ranks == 0
    elif words[:2] == ["python", "-m"] and words[2] != "pytest":
        assert (ROOT / Path(*words[2].split("."))).with_suffix(".py").is_file()
    elif words[script] in parsed:
        parse(parsed[words[script]], words[2:])
    else:
        assert words[0] in others or words[2] == "pytest" or (ROOT / words[script]).is_file(), command
    files = [word for word in words[script:] if re.fullmatch(r"(configs|tests|benchmarks)/\S+\.(toml|py|sh)", word)]
    assert all((ROOT / word).is_file() for word in files)


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(counted(page.read_text(encoding="utf-8")), encoding="utf-8")
