"""The site that ``make docs`` builds: no warnings, every public name in the reference, every page in the search."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PUBLIC = ("fray", "fray.aio", "fray.blocking", "fray.v2", "fray.job")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs") / "site"
    pytest.importorskip("nbconvert", reason="the packages of constraints-docs.txt are not installed (tools/venv docs)")
    done = subprocess.run(
        [sys.executable, "tools/build_docs.py", str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return directory


@pytest.mark.full
@pytest.mark.within(600)
def test_the_site_has_every_page_and_every_public_name(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    names = {
        name
        for kind, entries in InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data.items()
        if kind.startswith("py:")
        for name in entries
    }
    for module in PUBLIC:
        exported = importlib.import_module(module).__all__
        assert [name for name in exported if f"{module}.{name}" not in names] == []
    assert {"fray.Scope.launch", "fray.JobState.RUNNING", "fray.v2.Client.submit"} <= names

    text = (site / "searchindex.js").read_text()
    index = json.loads(text[text.index("(") + 1 : text.rindex(")")])
    pages = {page.stem for page in (ROOT / "docs").iterdir() if page.suffix in (".md", ".ipynb")} | {
        "README",
        "CONTRIBUTING",
        "CHANGELOG",
    }
    assert pages - set(index["docnames"]) == set()
    commands = (site / "reference" / "commands.html").read_text()
    assert all(command in commands for command in ("fray explain", "fray-controller", "fray-node"))
