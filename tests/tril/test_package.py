"""What `pip install` brings: the package tril with its page, and nothing that another project has a name for."""

import re
import shutil
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.conftest import ROOT, run_python


def test_the_wheel_has_tril_and_its_page_alone(tmp_path: Path) -> None:
    """Built from a copy, since setuptools writes beside what it reads, and without a network."""
    ignored = shutil.ignore_patterns(".*", "out", "prepared", "__pycache__", "*.egg-info", "build")
    tree = shutil.copytree(ROOT, tmp_path / "tree", ignore=ignored)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    done = run_python("-m", "pip", "wheel", *offline, "-w", tmp_path, tree)
    if "No module named" in done.stderr:  # to look for pip in this process would hide the distutils of setuptools
        pytest.skip("pip and setuptools build the wheel")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = ZipFile(wheel).namelist()
    about = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    assert {name.split("/")[0] for name in names} == {"tril", about} and about.startswith("tril_attention-")
    ours = {str(path.relative_to(ROOT)) for path in ROOT.glob("tril/*") if path.is_file()}
    assert {name for name in names if name.startswith("tril/")} == ours
    assert {"tril/page.html", "tril/page.css", "tril/page.js"} <= ours
    about = ZipFile(wheel).read(f"{about}/METADATA").decode()
    needed = re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", about, re.MULTILINE)
    assert needed == ["torch", "numpy", "tqdm", "jinja2", "matplotlib"]
