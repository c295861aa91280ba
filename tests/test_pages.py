"""The pages: their code prints what they show, their links lead somewhere, their diffs do what they say."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FILES = [ROOT / "README.md", *DOCS.glob("*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
CHANGES = {part.splitlines()[0]: part for part in PAGES["docs/change_it.md"].split("\n## ") if "```diff" in part}
TINY = "--data.source input.txt --data.tokenizer bytes --model.n_embd 32 --train.max_steps 1 --train.eval_tokens 100"
TINY += " --train.sample_tokens 0 --train.device cpu --train.dtype float32"


@pytest.mark.parametrize("page", [page for page in PAGES if page != "README.md"])  # whose code needs a trained model
def test_the_code_of_a_page_prints_what_it_shows(page: str) -> None:
    names = {}
    torch.set_printoptions(profile="default")  # a page may change them
    for code, shown in re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGES[page], re.DOTALL):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        assert printed.getvalue() == shown, code


def titles(page: Path) -> set[str]:
    """The names by which links lead to the titles of a page."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, title = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert link.startswith("http") or target.exists(), link
        assert link.startswith("http") or not title or title in titles(target), link


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the project with a text, to be changed."""
    ignored = shutil.ignore_patterns(".*", "out", "prepared", "__pycache__", "*.egg-info")
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored)
    (tree / "input.txt").write_text("To be, or not to be, that is the question. " * 100)
    return tree


def apply(diff: str, tree: Path) -> None:
    done = subprocess.run(["git", "apply", "-"], input=diff, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(command: str, tree: Path, training: str = TINY) -> str:
    """Run a command of the page in the tree, training for one step only: the text that it prints."""
    words = [*shlex.split(command)[1:], *(training.split() if "train.py" in command else [])]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run([sys.executable, *words], cwd=tree, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


def loosened(text: str) -> str:
    """The text with measured numbers taken out, and lines joined."""
    return re.sub(r"\b\d+(\.\d+)?(e-\d+)?(?= \(|$| and)", "#", re.sub(r"\s+", " ", text).strip())


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_judged_as_the_page_says(change: str, tree: Path) -> None:
    said = ""
    for kind, content in re.findall(r"```(\w+)\n(.*?)```", CHANGES[change], re.DOTALL):
        if kind == "diff":
            apply(content, tree)
        elif kind == "sh":
            said = "".join(run(command, tree) for command in content.splitlines())
        else:
            assert loosened(content) in loosened(said), said
            if "causal: yes" in content:
                assert "Traceback" not in said and "not those of the kernel" not in said and "head entropy" in said, (
                    said
                )
    tests = run("python -m pytest -x -m 'not long' tests/test_leakage.py", tree)
    assert (" failed" in tests or "FAILED" in tests) == ("leak" in change), tests


@pytest.mark.long
def test_the_source_and_the_batches_of_docs_data_are_trained_on(tree: Path) -> None:
    for diff in re.findall(r"```diff\n(.*?)```", PAGES["docs/data.md"], re.DOTALL):
        apply(diff, tree)
    said = run("python train.py --data.source sums:2000", tree, TINY.replace("--data.source input.txt ", ""))
    assert (tree / "out" / "sums-2000" / "checkpoints").is_dir(), said
    refused = run("python train.py --data.source sums:many", tree, "")
    assert refused.endswith("train.py: how many sums? Expected a number, as in sums:20000, got 'many'\n")
