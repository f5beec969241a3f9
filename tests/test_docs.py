"""Every Python block of README.md and docs/ runs, page by page; shell blocks that say ``run`` run too.

The blocks of a page share one namespace, in order, in a process of its own. A block that awaits at top level runs
inside ``async with fray.open_cluster("local") as cluster, cluster.open_scope("docs") as scope``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NEEDS_EXTRAS = {"examples.md", "from-ray.md"}
LONG = {"upgrade.md"}
"""Pages that only ``make test-all`` runs, as they take half a minute."""
"""Pages that import pyarrow or Ray, which only `make test-all` installs."""
NEEDS_TORCH = re.compile(r"^(import torch|from fray import .*\b(rl|tinker)\b|from fray\.(rl|tinker)\b)", re.MULTILINE)
"""Found in pages whose blocks `make test-rl` runs."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, ROOT / "CONTRIBUTING.md"]
NOT_OURS = {
    "workspaces.md": {"fray.workspace"},
    "tinker.md": {"fray.priority"},
    "tracing.md": {
        *("fray.job.id", "fray.job.name", "fray.attempt", "fray.member", "fray.node", "fray.outcome"),
        *("fray.actor.id", "fray.actor.name"),
    },
}
"""Page: dotted names that are loggers, keys of configurations, attributes of spans, or belong to former versions."""
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
WITHIN_S = 100
WITHIN_WITH_TORCH_S = 300
"""The blocks of such a page train several runs."""

PROGRAM = """
import ast, inspect, itertools, json, sys
import trio, fray

def compiled(line, source):
    return compile("\\n" * line + source, sys.argv[1], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

async def awaiting(codes):
    async with fray.open_cluster("local") as cluster, cluster.open_scope("docs") as scope:
        globals().update(cluster=cluster, scope=scope)
        for code in codes:
            await eval(code, globals())

blocks = [compiled(*block) for block in json.load(sys.stdin)]
for awaits, codes in itertools.groupby(blocks, lambda code: bool(code.co_flags & inspect.CO_COROUTINE)):
    if awaits:
        trio.run(awaiting, list(codes))
    else:
        for code in codes:
            exec(code, globals())
"""


def blocks(page: Path, info: str) -> list[tuple[int, str]]:
    """Line before the first, and text, of each block that is fenced as ``info``."""
    text = page.read_text()
    found = [match for match in FENCE.finditer(text) if match["info"].strip() == info]
    return [(text.count("\n", 0, match.start("body")), match["body"]) for match in found]


def needs_torch(page: Path) -> bool:
    return any(NEEDS_TORCH.search(text) for _, text in blocks(page, "python"))


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    marks = dict.fromkeys(NEEDS_EXTRAS | LONG, pytest.mark.full) | {"first-hour.md": pytest.mark.first_hour}
    if needs_torch(page):
        missing = importlib.util.find_spec("torch") is None
        skipped = pytest.mark.skipif(missing, reason="needs torch: make test-rl")
        return [pytest.mark.torch, skipped, pytest.mark.within(WITHIN_WITH_TORCH_S + 20)]
    return [marks[page.name]] if page.name in marks else []


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=_marks(page)) for page in PAGES if blocks(page, "python")],
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if needs_torch(page):
        request.getfixturevalue("warm_cluster")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(page.relative_to(ROOT))],
        input=json.dumps(blocks(page, "python")),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WITHIN_WITH_TORCH_S if needs_torch(page) else WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=_marks(page)) for page in PAGES if blocks(page, "sh run")],
)
def test_the_marked_shell_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for _, script in blocks(page, "sh run"):
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=ROOT,
            env={**os.environ, "PATH": path, "XDG_STATE_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for file, anchor in re.findall(r"\]\(([^)#: ]*)(?:#([^)]*))?\)", FENCE.sub("", page.read_text())):
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{file}#{anchor}")
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as browsers of repositories and Sphinx make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_files_and_directories_named_by_a_page_exist(page: Path) -> None:
    names = set(re.findall(r"`((?:fray|tests|bench|examples|docs|tools)/[\w./-]*)`", page.read_text()))
    assert sorted(name for name in names if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_modules_and_names_of_fray_named_by_a_page_exist(page: Path) -> None:
    names = set(re.findall(r"(?<![\w./-])fray(?:\.[A-Za-z_]\w*)+", page.read_text()))
    wrong = [name for name in sorted(names) if not is_there(name) and name not in NOT_OURS.get(page.name, set())]
    assert wrong == []


def is_there(name: str) -> bool:
    """Return whether ``name`` is a module of ours, or can be reached from one by attributes."""
    module, attributes = name, []
    while True:
        try:
            value = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if not f"{error.name}".startswith("fray"):  # the module needs an extra that is not installed
                return True
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    for attribute in attributes:
        fields = getattr(value, "__annotations__", {})
        try:
            if not hasattr(value, attribute):
                return attribute in fields
        except ImportError as error:  # the name needs an extra that is not installed
            return "pip install" in str(error) and attribute in value.__all__
        value = getattr(value, attribute)
    return True


def test_names_of_fray_in_docstrings_exist() -> None:
    wrong = []
    for file in sorted((ROOT / "fray").rglob("*.py")):
        names = set(re.findall(r"(?<!`)`(fray(?:\.[A-Za-z_]\w*)+)", file.read_text()))
        wrong += [f"{file.relative_to(ROOT)}: {name}" for name in sorted(names) if not is_there(name)]
    assert wrong == []


def test_pages_named_in_code_exist() -> None:
    wrong = []
    for file in [
        path for part in ("fray", "tests", "bench", "examples", "tools") for path in (ROOT / part).rglob("*.py")
    ]:
        for page, anchor in re.findall(r"\bdocs/([a-z0-9-]+\.md)(?:#([\w-]+))?", file.read_text()):
            target = ROOT / "docs" / page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{file.relative_to(ROOT)}: docs/{page}#{anchor}")
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=lambda page: page.name)
def test_a_page_of_docs_is_listed_in_the_index(page: Path) -> None:
    assert page.name == "index.md" or f"({page.name})" in (ROOT / "docs" / "index.md").read_text()


def test_parts_in_the_package_table_of_the_design_exist() -> None:
    rows = re.findall(r"^\| `(fray/\w+/)` \| (.*) \|$", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    assert len(rows) >= 10
    for package, text in rows:
        parts = {path.name.removesuffix(".py") for path in (ROOT / package).iterdir()}
        assert set(re.findall(r"`(\w+)`", text)) <= parts, package
