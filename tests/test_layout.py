"""The walls of the house: who may import whom, who alone opens which library, and what stays pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fray"

WORDS = {"model", "errors"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "model": {"errors"},
    "net": WORDS,
    "scheduler": WORDS,
    "runtime": {"net"} | WORDS,
    "node": {"net"} | WORDS,
    "controller": {"scheduler", "net"} | WORDS,
    "api": {"runtime"} | WORDS,
    "blocking": {"api"} | WORDS,
    "threads": set(),
    "job": {"blocking", "api", "threads"} | WORDS,
    "v2": {"blocking", "api", "threads"} | WORDS,
}
"""Part: what it may import besides itself. Parts that are not here (local, testing, cli, …) put the others together."""

INSIDE_FUNCTIONS = {("api", "deploy")}
"""`open_cluster` chooses among the kinds of clusters when it is called."""

BRIDGE = {
    *("blocking/bridge/portal.py", "blocking/bridge/background_loop.py", "blocking/bridge/call_sender.py"),
    *("blocking/bridge/pickling.py", "blocking/bridge/objects.py", "blocking/bridge/remote_generators.py"),
}
"""Of the blocking face, these alone know the loop: they import trio and the runtime."""

ALONE_OPENS = {
    "cattrs": "net/codec.py",
    "trio_websocket": "net/transports/trio_handshake.py",
    "cloudpickle": "runtime/serialization/pickling.py",
    "pickle": "runtime/serialization/pickling.py",
    "sqlite3": "controller/store.py",
    "fsspec": "net/storage.py",
    "uv": "node/environments/builder.py",
    "google": "controller/providers/tpu_api.py",
    "grpc": "controller/providers/tpu_api.py",
    "ray": "v2/ray_backend/",
    "iris": "v2/iris",
}
PUT_TOGETHER = ("testing", "deploy", "cli")

PURE = (
    *(
        "errors.py",
        "net/codec.py",
        "net/channel/session.py",
        "net/auth.py",
        "net/transports/http_upgrade.py",
        "node/reconcile.py",
    ),
    *("node/state_reports.py", "node/environments/recipe.py"),
    *("net/buffers/chunks.py", "net/buffers/segment_allocator.py", "runtime/scope/children.py"),
    *("runtime/calls/wire.py", "runtime/tasks/policy.py", "runtime/objects/refcount.py"),
    *("model/**/*.py", "scheduler/**/*.py"),
)
IMPURE = {
    *("trio", "time", "datetime", "secrets", "socket", "select", "os", "io", "pathlib", "tempfile", "shutil"),
    *("subprocess", "threading", "signal"),
}
FOR_ANNOTATIONS = {"random"}
"""A pure module may name `random.Random`, the type of the generator it is given, and nothing else of it."""


def imports(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Each imported module, its line, and whether it is imported inside a function."""
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno, id(node) in inside) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports of Fray are written in full"
            yield from ((f"{node.module}.{name.name}", node.lineno, id(node) in inside) for name in node.names)


def part_of(module: str) -> str:
    """``fray.net.codec`` is of the part ``net``."""
    return [*module.split("."), "fray"][1]


def violations(path: str, source: str) -> Iterator[str]:
    """Sentences about what the file at ``path`` (below ``fray/``) must not do."""
    tree = ast.parse(source)
    part = path.split("/")[0].removesuffix(".py")
    pure = any(Path(path).match(pattern) or Path(path).match(pattern.replace("**/", "")) for pattern in PURE)
    for module, line, in_function in imports(tree):
        library = module.split(".")[0]
        where = f"fray/{path}:{line}"
        if library == "fray" and part in MAY_IMPORT:
            other = part_of(module)
            allowed = other == part or other in MAY_IMPORT[part] or (in_function and (part, other) in INSIDE_FUNCTIONS)
            allowed = allowed or (other == "runtime" and path in BRIDGE)
            if not allowed:
                yield f"{where}: {part} must not import {module}; it may import {sorted(MAY_IMPORT[part])}"
        if library in ALONE_OPENS and not path.startswith(ALONE_OPENS[library]) and part not in PUT_TOGETHER:
            yield f"{where}: {library} is opened by fray/{ALONE_OPENS[library]} alone"
        if library == "trio" and part == "blocking" and path not in BRIDGE:
            yield f"{where}: only the bridge ({', '.join(sorted(BRIDGE))}) knows the loop"
        if pure and library in IMPURE:
            yield f"{where}: this file is pure, but imports {module}"
    if pure:
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in FOR_ANNOTATIONS
            ):
                if node.attr != "Random":
                    yield f"fray/{path}:{node.lineno}: this file is pure, but draws from random.{node.attr}"
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "open":
                yield f"fray/{path}:{node.lineno}: this file is pure, but opens a file"
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "Random":
                yield f"fray/{path}:{node.lineno}: this file is pure, but makes a generator of its own"


def test_every_file_keeps_to_its_room() -> None:
    found = [
        sentence
        for path in sorted(ROOT.rglob("*.py"))
        for sentence in violations(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not found, "\n" + "\n".join(found)


def test_nothing_is_called_utils() -> None:
    assert not [path for path in ROOT.rglob("*.py") if path.stem in ("utils", "util", "helpers", "common", "misc")]


@pytest.mark.parametrize(
    ("path", "source", "sentence"),
    [
        ("node/main.py", "from fray.runtime.actors import server", "node must not import fray.runtime.actors.server"),
        ("scheduler/step.py", "import trio", "is pure, but imports trio"),
        ("model/ids.py", "import random\nx = random.choice('ab')", "draws from random.choice"),
        ("net/channel/session.py", "def f():\n    from time import monotonic", "is pure, but imports time.monotonic"),
        ("runtime/calls/caller.py", "import cloudpickle", "opened by fray/runtime/serialization/pickling.py alone"),
        ("api/cluster.py", "from fray.deploy import local", "api must not import fray.deploy.local"),
        ("node/main.py", "import fray", "node must not import fray"),
        ("model/messages/calls.py", "open('/etc/passwd')", "opens a file"),
        ("net/channel/session.py", "import random\nrng = random.Random(0)", "makes a generator of its own"),
        (
            "blocking/actors.py",
            "from fray.runtime.calls import caller",
            "blocking must not import fray.runtime.calls.caller",
        ),
        ("blocking/futures.py", "import trio", "only the bridge"),
    ],
)
def test_a_wall_that_is_climbed_is_told_as_a_sentence(path: str, source: str, sentence: str) -> None:
    assert any(sentence in found for found in violations(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("api/cluster.py", "def f():\n    from fray.deploy import local"),
        ("net/channel/session.py", "import random\ndef f(rng: random.Random): ..."),
        ("testing/sim.py", "import trio, sqlite3\nfrom fray.controller import loop"),
        ("model/messages/calls.py", "from fray.errors import FrayError"),
    ],
)
def test_a_door_is_no_wall(path: str, source: str) -> None:
    assert list(violations(path, source)) == []
