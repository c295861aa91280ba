"""The tour runs from top to bottom, and shows what such a run has shown."""

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.scripts.test_pages import tree  # noqa: F401  a fixture

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

TOUR = ROOT / "docs" / "tour.ipynb"
DEPENDS = ("%run", "inspect_heads(RUN", "print(inspection.")  # in cells whose words, too, depend on what was learnt


def shown(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell shows: the words of its text, if learning does not change them, and the types of all outputs."""
    text = "".join(output.get("text", "") for output in cell.outputs)
    words = [] if any(word in cell.source for word in DEPENDS) else re.findall(r"[a-z]{2,}", text)
    return words + sorted({f"{output.get('name')} {sorted(output.get('data', {}))}" for output in cell.outputs})


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.long
def test_the_tour_runs_and_shows_what_is_stored(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """With fewer steps. It starts in docs/, as Jupyter does, and needs no network: pip would have no index."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tree.parent))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    stored = code_cells(nbformat.read(TOUR, as_version=4))
    notebook = nbformat.read(tree / "docs" / "tour.ipynb", as_version=4)
    (training,) = (cell for cell in notebook.cells if "STEPS = 1000 " in cell.source)
    training.source = training.source.replace("STEPS = 1000 ", "STEPS = 20 ")
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tree / "docs"}}).execute()
    for old, new in zip(stored, code_cells(notebook), strict=True):
        assert old.execution_count == new.execution_count
        assert shown(old) == shown(new), new.source


def test_the_tour_is_stored_as_it_was_run_and_names_no_machine() -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert len(notebook.cells) <= 21 and TOUR.stat().st_size < 1_000_000
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/html", "") for output in outputs)
    assert not re.search(r"/(?:home|Users|root|tmp|work|content)/", text)
    assert re.search(r"^step    1000 \| val loss", text, re.MULTILINE)
    shares = {head: float(share) for head, share in re.findall(r"with head (\S+) (\S+)", text)}
    assert f"what followed the same token before: {max(shares, key=shares.get)} " in text  # as the tour says of patches
    assert re.search(r"«re» looks at 3 «ad»: weight (0\.[5-9]|1)", text) and "\nmissed: rise of the loss" in text
    both = "".join(output.data["text/plain"] for output in outputs if output.output_type == "execute_result")
    assert "\nknown better by tour step-00001000: " in both
