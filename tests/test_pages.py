"""The pages of docs/: their code prints what they show, their diffs apply and are judged as they say."""

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.crash import in_child

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
ROOMS = ("model", "data", "training", "inspection", "configs")
SCRIPTS = ("train.py", "sample.py", "inspect_attention.py")
CHANGES = (DOCS / "change_it.md").read_text(encoding="utf-8").split("\n## ")[1:]
CHANGES = {part.splitlines()[0]: part for part in CHANGES if "```diff" in part}
TINY = "--model.n_embd 32 --train.max_steps 1 --train.eval_tokens 100 --train.device cpu --train.dtype float32"


def load_figures() -> object:
    spec = importlib.util.spec_from_file_location("figures_of_docs", DOCS / "figures.py")
    figures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figures)
    return figures


def test_the_code_of_the_pages_prints_what_they_show(tmp_path: Path) -> None:
    figures = load_figures()
    try:
        for page in DOCS.glob("*.md"):
            names, ran = figures.run_page(page.read_text(encoding="utf-8"))
            for block in ran:
                assert block.printed == block.shown, f"{page.name}, the block of line {block.line}"
            for figure, draw in figures.FIGURES.get(page.name, {}).items():
                for copy in ("first", "second"):
                    draw(tmp_path / f"{copy}_{figure}", names)
                drawn = (tmp_path / f"first_{figure}").read_bytes()
                assert drawn == (tmp_path / f"second_{figure}").read_bytes() and b"<svg" in drawn
    finally:
        torch.set_printoptions(profile="default")


def test_a_page_that_lies_is_noticed() -> None:
    figures = load_figures()
    page = "# Sums\n\n```python\nx = 2\nfor i in range(2):\n    x += i\n\nx\n```\n\n```text\n4\n```\n"
    _, (block,) = figures.run_page(page)
    assert (block.line, block.printed, block.shown) == (3, "3\n", "4\n")
    assert figures.written_anew(page, [block]) == page.replace("4", "3")
    with pytest.raises(SyntaxError):  # a console wants an empty line after a loop
        figures.run_page(page.replace("i\n\n", "i\n"))
    with pytest.raises(SyntaxError, match="line 3"):
        figures.run_page("\n\n```python\nx = (\n```\n")
    with pytest.raises(ZeroDivisionError):
        figures.run_page(page.replace("2", "1 / 0", 1))


def test_every_picture_has_a_script() -> None:
    figures = load_figures()
    drawn = {name for of_page in figures.FIGURES.values() for name in of_page}
    pictures = {path.name for kind in ("png", "svg") for path in DOCS.glob(f"*.{kind}")}
    commands = [line.strip() for line in figures.__doc__.replace("\\\n", "").splitlines() if " docs/" in line]
    by_command = {words[-1].removeprefix("docs/") for words in map(str.split, commands) if (ROOT / words[1]).is_file()}
    assert pictures == drawn | by_command - {"figures.py"}
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for picture in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / picture).is_file() and Path(picture).name in pictures, picture


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in DOCS.glob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, place = link.partition("#")
        if path.startswith("http"):
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if place else []
        assert not place or place in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], link


class Tree(NamedTuple):
    """A copy of the code, to be changed."""

    path: Path

    def apply(self, diff: str) -> None:
        done = subprocess.run(["git", "apply", "-"], input=diff, cwd=self.path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def run(self, commands: str) -> str:
        """What these commands print, in a forked process that has nothing of our own packages."""

        def work() -> None:
            os.chdir(self.path)
            sys.path.insert(0, str(self.path))
            for name in [name for name in sys.modules if name.split(".")[0] in (*ROOMS, *(s[:-3] for s in SCRIPTS))]:
                del sys.modules[name]
            for command in commands.splitlines():
                _, script, *arguments = shlex.split(command)
                sys.argv = [script, *arguments, *(TINY.split() if script == "train.py" else [])]
                module = importlib.import_module(script.removesuffix(".py"))
                assert Path(module.__file__).parent == self.path
                importlib.import_module("configs").run_script(module.main)

        in_child(work, said=self.path / "said")
        return (self.path / "said").read_text(encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    torch.use_deterministic_algorithms(True)  # as train.py does: it imports much, once instead of in every child
    torch.use_deterministic_algorithms(False)
    path = tmp_path / "tree"
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__", "prepared")
        shutil.copytree(ROOT / room, path / room, ignore=ignored)
    for script in SCRIPTS:
        shutil.copy(ROOT / script, path / script)
    (path / "input.txt").write_text("To be, or not to be, that is the question. " * 100)
    return Tree(path)


def loosened(text: str) -> str:
    """The text with measured numbers taken out, and lines joined."""
    return re.sub(r"\b\d+(\.\d+)?(e-\d+)?(?= \(|$| and)", "#", re.sub(r"\s+", " ", text).strip())


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_judged_as_the_page_says(change: str, tree: Tree) -> None:
    said = ""
    for kind, content in re.findall(r"```(\w+)\n(.*?)```", CHANGES[change], re.DOTALL):
        if kind == "diff":
            tree.apply(content)
        elif kind == "sh":
            said = tree.run(content)
        else:
            assert loosened(content) in loosened(said), said
            if "causal: yes" in content:
                assert "Traceback" not in said and "not those of the kernel" not in said and "near > far" in said, said
    assert said


@pytest.mark.long
@pytest.mark.parametrize(
    "change, before, after, expected",
    [
        ("3. A window", ".triu(1 - WINDOW)", ".triu(-WINDOW)", "which its mask hides"),
        (
            "4. The leak",
            '    scores = scores.masked_fill(~mask, float("-inf"))\n    return 10 * torch.tanh(scores / 10)\n',
            '    scores = 10 * torch.tanh(scores / 10)\n    return scores.masked_fill(~mask, float("-inf"))\n',
            "causal: yes",
        ),
    ],
    ids=["one token too many", "the cap before the mask"],
)
def test_what_the_page_says_of_what_it_does_not_show(
    change: str, before: str, after: str, expected: str, tree: Tree
) -> None:
    for diff in re.findall(r"```diff\n(.*?)```", CHANGES[change], re.DOTALL):
        tree.apply(diff)
    source = (tree.path / "model" / "attention.py").read_text(encoding="utf-8")
    assert source.count(before) == 1
    (tree.path / "model" / "attention.py").write_text(source.replace(before, after), encoding="utf-8")
    assert expected in tree.run(re.findall(r"```sh\n(.*?\n)", CHANGES[change])[-1])


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_leakage_is_noticed_by_its_tests_alone(change: str, tree: Tree) -> None:
    shutil.copytree(ROOT / "tests", tree.path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree.path)
    for diff in re.findall(r"```diff\n(.*?)```", CHANGES[change], re.DOTALL):
        tree.apply(diff)
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not long", "tests/test_leakage.py"]
    done = subprocess.run(command, cwd=tree.path, capture_output=True, text=True)
    assert done.returncode == (1 if "leak" in change else 0), done.stdout
