"""The house: the imports, no code that executes data, and commands on the pages that exist."""

import ast
import math
import re
import shlex
import sys
from collections.abc import Iterator

import pytest

import inspect_attention
import sample
import train
import tril
from benchmarks import compare
from cli.options import parse
from tests.conftest import ROOT, hold

SCRIPTS = {"train", "sample", "inspect_attention"}
ANYWHERE = {"errors", "files"}  # what every room but tril may use
ROOMS = {"tril", "model", "data", "training", "inspection", "cli"}
MAY_IMPORT = {  # room -> what it may import of ours, besides itself
    "tril": set(),
    "model": ANYWHERE,
    "cli": ANYWHERE,
    "data": ANYWHERE | {"cli"},
    "training": ANYWHERE | {"tril", "model", "data", "cli"},
    "inspection": ANYWHERE | {"tril", "model", "data", "cli"},
    "cores.py": set(),
    "errors.py": {"tril"},
    "files.py": {"errors"},
    **{f"{name}.py": ANYWHERE | ROOMS | {"cores"} for name in SCRIPTS},
}
OURS = ANYWHERE | ROOMS | SCRIPTS | {"cores", "benchmarks", "tests"}
SOURCES = sorted([*ROOT.glob("*.py"), *(path for name in MAY_IMPORT for path in (ROOT / name).rglob("*.py"))])
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
LINES = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
MISTAKES = {"errors.py", "tril/errors.py"}  # which nobody has to read to know the model
GUARD = re.compile("__main__|TYPE_CHECKING")
by_file = pytest.mark.parametrize("file", TREES)


def statements(file: str, late: bool = True) -> Iterator[list[str]]:
    """What each import names: `from a import b` gives a and a.b.

    late: also those inside functions, for type checkers, and under `if __name__ == "__main__"`.
    """
    apart = [node for node in TREES[file].body if isinstance(node, ast.If) and GUARD.search(ast.unparse(node.test))]
    apart += [node for node in ast.walk(TREES[file]) if isinstance(node, ast.FunctionDef)]
    skipped = set() if late else {inner for outer in apart for inner in ast.walk(outer)}
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Import) and node not in skipped:
            yield from ([alias.name] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node not in skipped:
            assert node.level == 0, f"{file}: a relative import"
            yield [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def imports(file: str) -> list[str]:
    return [name for names in statements(file) for name in names]


def packages(file: str) -> set[str]:
    return {name.split(".")[0] for name in imports(file)}


def edges(late: bool) -> dict[str, set[str]]:
    """file -> the files that it imports, or what a package offers in its __init__.py."""
    found = {file: set() for file in TREES}
    for file in TREES:
        for names in statements(file, late):
            paths = [name.replace(".", "/") for name in names]
            files = TREES.keys() & {f"{path}.py" for path in paths}
            found[file] |= files or TREES.keys() & {f"{path}/__init__.py" for path in paths}
    if late:  # it loads by name
        found["tril/__init__.py"] |= {f"tril/{name}.py" for name in tril.OFFERED.values()}
    return found


EDGES = edges(late=False)


@by_file
def test_imports_follow_the_arrows(file: str) -> None:
    room = file.split("/")[0]
    assert packages(file) & OURS <= MAY_IMPORT[room] | {room}


def test_the_class_of_mistakes_is_all_that_errors_takes() -> None:
    assert EDGES["errors.py"] == edges(late=True)["errors.py"] == {"tril/errors.py"}


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_a_script_sets_how_threads_wait_before_torch_is_loaded(script: str) -> None:
    names = imports(f"{script}.py")
    assert {*names[: names.index("cores")]} <= sys.stdlib_module_names


def test_no_files_import_each_other() -> None:
    left = edges(late=True)
    while leaves := [file for file, targets in left.items() if not targets & left.keys()]:
        for file in leaves:
            del left[file]
    assert not left, f"files in a circle of imports, or importing one: {', '.join(left)}"


@pytest.mark.parametrize("file", ["model/attention.py", "tril/causality.py"])
def test_a_file_that_can_be_lifted_out_imports_torch_alone(file: str) -> None:
    assert packages(file) - {"torch"} <= sys.stdlib_module_names


def reached(file: str) -> set[str]:
    """The files that a file imports, directly or not, and itself; without __init__.py."""
    found, new = set(), {file}
    while new:
        found |= new
        new = {target for each in new for target in EDGES[each]} - found
    return {each for each in found if not each.endswith("__init__.py")}


def test_the_model_needs_little_else() -> None:
    core = reached("model/gpt.py")
    assert not core & {f"model/{name}.py" for name in ("checkpoint", "device", "huggingface", "load", "packed")}
    lines = sum(LINES[file] for file in core)
    hold(len(core) <= 9 and lines <= 770, f"model/gpt.py reaches {len(core)} files and {lines} lines, ours 8 and 764")


def test_the_trainer_reaches_few_files() -> None:
    assert len(reached("train.py")) - 1 <= 42


def counted(readme: str) -> str:
    """README.md with the line counts as they are now."""
    core = reached("model/gpt.py") - MISTAKES | {"train.py"}
    readme = re.sub(r"(?<=\[)(\S+\.py)(\]\(\1\), )\d+ lines", lambda m: f"{m[1]}{m[2]}{LINES[m[1]]} lines", readme)
    readme = re.sub(r"(?<=ead these )\d+ lines", f"{sum(LINES[file] for file in core)} lines", readme)

    def count(found: re.Match) -> str:
        number = sum(lines for file, lines in LINES.items() if file == found[1] or file.startswith(found[1]))
        return f"{found[1]}{number:{len(found[2])},}"

    return re.sub(r"^(\w+/|\w+\.py)( +[\d,]+)(?=  )", count, readme, flags=re.MULTILINE)


def test_readme_counts_lines_as_they_are() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = MISTAKES.union(re.findall(r"^\d\. \[(\S+\.py)\]", readme, re.MULTILINE))
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
        path = ROOT.joinpath(*words[2].split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()
    elif words[script] in parsed:
        parse(parsed[words[script]], words[2:])
    else:
        assert words[0] in others or words[2] == "pytest" or (ROOT / words[script]).is_file(), command
    files = [word for word in words[script:] if re.fullmatch(r"(configs|tests|benchmarks)/\S+\.(toml|py|sh)", word)]
    assert all((ROOT / word).is_file() for word in files)


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(counted(page.read_text(encoding="utf-8")), encoding="utf-8")
