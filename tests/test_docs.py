"""Every Python block of README.md and docs/ runs, page by page; shell blocks that say ``run`` run too.

The blocks of a page share one namespace, in order, in a process of its own. A block that awaits at top level runs
inside ``async with fray.open_cluster("local") as cluster, cluster.open_scope("docs") as scope``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOT_RUN = {"design.md"}
NEEDS_EXTRAS = {"examples.md", "from-ray.md"}
"""Pages that import pyarrow or Ray, which only `make test-all` installs."""
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in NOT_RUN)]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
WITHIN_S = 100

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


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.full] if page.name in NEEDS_EXTRAS else [])
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(page.relative_to(ROOT))],
        input=json.dumps(blocks(page, "python")),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh run")], ids=lambda page: page.name)
def test_the_marked_shell_blocks_of_a_page_run(page: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for _, script in blocks(page, "sh run"):
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_at_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", FENCE.sub("", page.read_text()))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    names = set(re.findall(r"`((?:fray|tests|bench|examples|docs)/[\w./]+\.(?:py|md))`", page.read_text()))
    assert sorted(name for name in names if not (ROOT / name).exists()) == []
