"""The house: who imports whom, no code that executes data, and a README whose commands exist."""

import ast
import re
import shlex
from pathlib import Path

import pytest

import inspect_attention
import sample
import train
from configs import parse

ROOT = Path(__file__).parent.parent
SCRIPTS = {"train", "sample", "inspect_attention"}
OURS = {"model", "data", "configs", "training", "inspection", *SCRIPTS}
MAY_IMPORT = {  # package -> what it may import of ours, besides itself
    "model": set(),
    "data": set(),
    "configs": set(),
    "training": {"model", "data", "configs"},
    "inspection": {"model"},
    **{f"{name}.py": OURS - SCRIPTS for name in SCRIPTS},
}
SOURCES = sorted([*ROOT.glob("*.py"), *(path for name in MAY_IMPORT for path in (ROOT / name).rglob("*.py"))])


def imports(path: Path) -> set[str]:
    """Top-level names a file imports; what it does only when run as a script, or for type checkers, does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    assert imports(path) & OURS <= MAY_IMPORT[room] | {room}


def test_attention_can_be_lifted_out() -> None:
    assert imports(ROOT / "model" / "attention.py") == {"math", "typing", "torch"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_executes_data(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not called & {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
    assert not called & {"torch.load", "torch.save", "torch.hub.load", "yaml.load", "shutil.unpack_archive"}
    options = {word.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords}
    assert not options & {"shell", "allow_pickle", "trust_remote_code", "weights_only"}
    assert not imports(path) & {"pickle", "dill", "shelve", "marshal", "runpy", "tarfile", "zipfile"}
    assert "subprocess" not in imports(path) or path.name == "verify.py"  # runs train.py, without a shell


def check_torchrun(words: list[str]) -> None:
    """The options of train.py, and that so many ranks can share a step."""
    script = words.index("train.py")
    options = dict(word.split("=") for word in words[:script])
    config = train.read_config(words[script + 1 :])
    world = int(options["--nproc_per_node"]) * int(options.get("--nnodes", "1"))
    assert config.train.grad_accum_steps % world == 0


def documented_commands() -> list[str]:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]
    blocks = [block for page in pages for block in re.findall(r"```(?:sh|bash)\n(.*?)```", page, re.DOTALL)]
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize("command", documented_commands())
def test_documented_commands_exist(command: str) -> None:
    words = [word for word in shlex.split(command, comments=True) if word != "--help"]
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[:2] == ["python", "train.py"]:
        parse(train.Config, words[2:])
        for word in words[2:]:
            assert not word.endswith(".toml") or (ROOT / word).is_file()
    elif words[0] == "torchrun":
        check_torchrun(words[1:])
    elif words[0] == "sbatch":
        assert (ROOT / words[1]).is_file()
        parse(train.Config, words[2:])
    elif words[:2] == ["python", "sample.py"]:
        parse(sample.Options, words[2:])
    elif words[:2] == ["python", "inspect_attention.py"]:
        parse(inspect_attention.Options, words[2:])
    elif words[:3] == ["python", "-m", "pytest"]:
        assert all((ROOT / path).is_file() for path in words[3:])
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / Path(*words[2].split("."))).with_suffix(".py").is_file()
    elif words[0] == "wandb":
        assert words[1:] == ["sync", "out/quickstart/wandb/offline-run-*"]  # as test_tracking finds them
    elif words[0] == "lm_eval":
        assert (ROOT / words[-1] / f"{words[words.index('--tasks') + 1]}.yaml").is_file()
    elif words[:1] == ["python"]:
        assert (ROOT / words[1]).is_file()
    else:
        assert words[0] in {"git", "cd", "pip", "python3", "source", ".", "hf"}, command


def test_readme_tree_names_what_is_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"^(?:    )?([\w/]+\.(?:py|toml|md))\b", text, re.MULTILINE):
        assert list(ROOT.rglob(name)), name


def test_the_workflow_is_what_lands_a_change() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"^ *- run: (.*)$", workflow, re.MULTILINE) == ["bash .ci/run"]
    oldest = re.search(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    assert f'python-version: ["{oldest}", ' in workflow


def test_the_image_has_what_is_there_and_nothing_that_git_ignores() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    for sources in re.findall(r"^COPY (.*) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    files = [(ROOT / name).read_text(encoding="utf-8").splitlines() for name in (".gitignore", ".dockerignore")]
    by_git, by_docker = ({line.strip("/").removeprefix("**/") for line in file} for file in files)
    assert by_git | {".git"} <= by_docker
