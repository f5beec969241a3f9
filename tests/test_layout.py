"""Rules about the layout of the package.

Who imports whom, who alone imports which library, what stays pure; and how large a folder, a module and the docstring
of a package may be.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from fray import public_names

TESTS = Path(__file__).parent
ROOT = TESTS.parent / "fray"
BESIDE_PACKAGES = {
    "support",
    "simulation",
    "processes",
    "network",
    "fuzz",
    "upgrade",
    "examples",
    "bench",
    "transcripts",
    "type_checks",
}
"""Folders of tests that belong to no one package; see CONTRIBUTING.md."""
WHOLE_PROJECT = {
    *("test_docs.py", "test_layout.py", "test_notebook.py", "test_prose.py", "test_reference.py", "test_trace.py"),
}
"""Tests about the project as a whole."""

WORDS = {"model", "errors", "tracebacks", "missing_names", "type_variables"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "tracebacks": {"errors"},
    "model": {"errors", "tracebacks", "type_variables"},
    "missing_names": {"errors", "model"},
    "type_variables": set(),
    "gc_tuning": set(),
    "net": WORDS,
    "scheduler": WORDS,
    "import_hooks": set(),
    "runtime": {"net", "import_hooks"} | WORDS,
    "node": {"net"} | WORDS,
    "controller": {"scheduler", "net", "gc_tuning"} | WORDS,
    "api": {"runtime"} | WORDS,
    "blocking": {"api"} | WORDS,
    "aio": {"blocking", "api", "runtime"} | WORDS,
    "threads": set(),
    "http_server": {"errors", "net"},
    "job": {"blocking", "api", "threads"} | WORDS,
    "v2": {"blocking", "api", "threads"} | WORDS,
    "rl": {"blocking", "api", "http_server", "runtime", "gc_tuning", "net"} | WORDS,
    "tinker": {"rl", "api", "http_server"} | WORDS,
    "monitoring": {"api"} | WORDS,
}
"""Part: what it may import besides itself. Parts that are not here (local, testing, cli, …) put the others together."""

INSIDE_FUNCTIONS = {("api", "deploy"), ("blocking", "public_names"), ("aio", "public_names"), ("rl", "tinker")}
"""`open_cluster` chooses among the kinds of clusters when it is called; the other faces say where a name is; a trainer
whose service is elsewhere loads the client of `fray.tinker` with its first request."""

BRIDGE = {
    *("blocking/bridge/portal.py", "blocking/bridge/background_loop.py", "blocking/bridge/call_sender.py"),
    *("blocking/bridge/pickling.py", "blocking/bridge/objects.py", "blocking/bridge/remote_generators.py"),
}
"""The modules of the blocking face that import trio and the runtime; the others work through them."""

ALONE_OPENS: dict[str, str | tuple[str, ...]] = {
    "anyio": "aio/crossing.py",
    "joblib": "blocking/joblib_backend.py",
    "cattrs": ("net/codec.py", "rl/recipe/typed.py"),
    "omegaconf": "rl/recipe/sources.py",
    "cryptography": "net/tls/certificates.py",
    "cloudpickle": "runtime/serialization/pickling.py",
    "pickle": "runtime/serialization/pickling.py",
    "sqlite3": ("controller/store.py", "tinker/store.py"),
    "fsspec": "net/storage.py",
    "uv": "node/environments/builder.py",
    "google": ("controller/providers/tpu_api.py", "tinker/wire/"),
    "grpc": "controller/providers/tpu_api.py",
    "ray": "v2/ray_backend/",
    "torch": ("rl/tensors/", "runtime/serialization/tensors.py"),
    "transformers": "rl/tensors/",
    "safetensors": "rl/tensors/",
    "iris": "v2/iris",
    "hypercorn": "http_server.py",
    "tensorboard": "rl/records/trackers.py",
    "wandb": "rl/records/trackers.py",
    "trackio": "rl/records/trackers.py",
    "mlflow": "rl/records/trackers.py",
    "starlette": ("rl/inference/", "tinker/", "monitoring/exporter.py", "monitoring/dashboard.py"),
    "prometheus_client": "monitoring/exposition.py",
    "opentelemetry": "runtime/tracing_sdk.py",
    "httpx": ("rl/inference/http_service.py", "rl/inference/weight_transfer.py", "tinker/http_client.py"),
}
PUT_TOGETHER = ("testing", "deploy", "cli")

PURE = (
    *(
        "errors.py",
        "net/codec.py",
        "net/channel/session.py",
        "net/channel/versions.py",
        "net/auth.py",
        "net/transports/http_upgrade.py",
        "node/reconcile.py",
    ),
    *("node/state_reports.py", "node/environments/recipe.py"),
    *("net/buffers/chunks.py", "net/buffers/segment_allocator.py", "runtime/scope/children.py"),
    *("runtime/calls/wire.py", "runtime/tasks/policy.py", "runtime/objects/refcount.py"),
    *("model/**/*.py", "scheduler/**/*.py", "rl/core/**/*.py"),
    *("tinker/core/**/*.py", "tinker/wire/**/*.py", "monitoring/exposition.py"),
    *("monitoring/rows.py", "monitoring/json_form.py"),
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
            openers = ALONE_OPENS[library]
            names = openers if isinstance(openers, str) else " and fray/".join(openers)
            yield f"{where}: {library} is opened by fray/{names} alone"
        if library == "tinker":
            yield f"{where}: the Tinker SDK is for users of a service, and never imported"
        if library == "trio" and part == "blocking" and path not in BRIDGE:
            yield f"{where}: only the bridge ({', '.join(sorted(BRIDGE))}) may import trio"
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


def test_every_file_imports_what_it_may() -> None:
    found = [
        sentence
        for path in sorted(ROOT.rglob("*.py"))
        for sentence in violations(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert not found, "\n" + "\n".join(found)


PATHS_OF_THE_GUIDE = {"rl/utils"}
"""Folders named as in NexRL's guide, whose users import `utils.logging_utils`; nothing else belongs there."""


def test_nothing_is_called_utils() -> None:
    unnamed = ("utils", "util", "helpers", "common", "misc")
    paths = [path for path in ROOT.rglob("*") if path.stem in unnamed and path.suffix in ("", ".py")]
    assert {path.relative_to(ROOT).as_posix() for path in paths} == PATHS_OF_THE_GUIDE
    assert {path.name for path in (ROOT / "rl" / "utils").glob("*.py")} == {"__init__.py", "logging_utils.py"}


@pytest.mark.parametrize(
    ("path", "source", "sentence"),
    [
        ("node/main.py", "from fray.runtime.actors import server", "node must not import fray.runtime.actors.server"),
        ("scheduler/step.py", "import trio", "is pure, but imports trio"),
        ("model/ids.py", "import random\nx = random.choice('ab')", "draws from random.choice"),
        ("net/channel/session.py", "def f():\n    from time import monotonic", "is pure, but imports time.monotonic"),
        ("runtime/calls/caller.py", "import cloudpickle", "opened by fray/runtime/serialization/pickling.py alone"),
        ("rl/core/leases.py", "import torch", "fray/rl/tensors/ and fray/runtime/serialization/tensors.py alone"),
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
def test_a_forbidden_import_is_reported_as_a_sentence(path: str, source: str, sentence: str) -> None:
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
def test_an_allowed_import_is_not_reported(path: str, source: str) -> None:
    assert list(violations(path, source)) == []


# Inside a package ----------------------------------------------------------------------------------------------------

LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "aio": (("crossing",), ("mirror",), ("nouns",)),
    "api": (
        ("async_block", "futures", "history", "job_html", "objects", "on_failure", "usage"),
        ("jobs",),
        ("actors", "launch_options", "node_admin", "people_admin", "port_forward", "reservation"),
        ("scope",),
        ("cluster",),
        ("actor_server", "open", "pools"),
        ("resolver",),
        ("actor_context",),
    ),
    "blocking": (
        ("bridge",),
        ("futures", "logs", "metadata"),
        ("actors", "jobs"),
        ("groups", "job_groups", "reservations"),
        ("hosts",),
        ("launching",),
        ("cluster",),
        ("actor_server", "open", "pools"),
        ("executor", "resolver"),
        ("actor_context", "joblib_backend"),
    ),
    "controller": (
        (
            "accepted_tokens",
            "audit_log",
            "blobs",
            "certificate_authority",
            "history",
            "join_tokens",
            "log_cache",
            "metrics",
            "people",
            "providers",
            "secret_store",
        ),
        ("policy_file", "workspaces"),
        ("store",),
        ("context", "restore"),
        ("backup", "connections", "loop", "provider_driver"),
        ("options", "serve"),
        ("main",),
    ),
    "model": (
        ("backoff", "frozen", "ids", "service_key", "text"),
        (
            *("constraints", "environment", "job_groups", "join_tokens", "log_records"),
            *("monitoring", "topology"),
        ),
        ("actors", "resources"),
        ("policy",),
        ("reservations", "specs"),
        ("gangs", "job_text", "messages", "requests", "restart_policy"),
        ("access", "monitoring.accounting", "workspace"),
    ),
    "net": (
        ("auth",),
        (
            "alarm",
            "atomic_file",
            "codec",
            "daemon_logging",
            "limited_log",
            "service_manager",
            "file_limits",
            "memory_protection",
            "own_address",
            "process_identity",
            "storage",
            "switch_interval",
            "tls",
            "transport",
        ),
        ("buffers", "cluster_token", "controller_address", "part_transfers", "transports"),
        ("channel", "large_values"),
        ("tunnels",),
    ),
    "node": (
        ("certificate", "config", "linux", "port_tunnels", "ports", "prepare", "reconcile", "secrets", "state_reports"),
        ("accounts", "containers", "joining", "logs", "resources"),
        ("controller_requests", "inventory", "job_process", "launcher", "node_details"),
        ("environments", "handover", "health", "self_test", "shim", "workspaces"),
        ("membership", "zygotes"),
        ("attempts", "run"),
        ("daemon",),
        ("embedded_main", "main"),
        ("__main__",),
    ),
    "rl": (
        ("train.checks",),
        (
            *("core", "data", "http_access", "model_spec", "nexrl_types", "process_start", "processes.actor_tasks"),
            *("processes.run_processes", "weights_table"),
        ),
        ("checkpoint", "inference.requests", "journal_file", "nexrl", "tokenizers", "train", "weight_files", "weights"),
        ("algorithm", "checkpoint_store", "recipe", "tensors", "utils"),
        ("inference", "messages", "trainer"),
        ("gateway",),
        ("records", "rollout", "trainer_process"),
        ("rollout_worker", "run_output", "run_parts"),
        ("coordinator", "records.run_log", "trainer_gang"),
        ("processes",),
        ("controller",),
        ("run_cluster", "run_job"),
        ("run",),
        ("recipe.run_recipe",),
        ("nexrl.guide_run", "recipe.resolved"),
        ("nexrl.controller",),
    ),
    "runtime": (
        (
            "background",
            "cancellation",
            "current_call",
            "deadlock",
            "notebook_cells",
            "services",
            "tracing_sdk",
            "user_warning",
            "waits",
        ),
        ("tracing", "unawaited"),
        ("serialization",),
        ("calls", "controller_client", "threads"),
        ("logs", "runtime"),
        ("actors", "port_forward", "workspaces"),
        ("objects", "scope"),
        ("open",),
        ("process",),
        ("__main__", "tasks"),
    ),
    "scheduler": (
        ("effects", "lifecycle", "reasons"),
        ("pool",),
        ("queue",),
        ("state",),
        ("backfill", "effect_buffer", "history"),
        ("jobs",),
        ("reservations",),
        ("nodes", "preemption", "sessions"),
        ("autoscaler", "placement"),
        ("explain",),
        ("views",),
        ("step",),
    ),
    "testing": (
        (
            "conformance",
            "ground_truth",
            "invariants",
            "seed",
            "sim_cloud",
            "sim_environments",
            "sim_workspaces",
            "tpu_cloud",
            "wheels",
        ),
        ("sim_devices", "sim_ports", "tpu_hosts", "tpu_server"),
        ("fakes",),
        ("sim_cluster",),
        ("faults", "stuck_tasks"),
        ("rare_faults",),
    ),
    "tinker": (
        ("core", "http_client"),
        ("wire",),
        (
            *("environments", "operations.operator_file", "opentinker.answers", "opentinker.client", "rewards"),
            *("cluster_users", "job_directories", "saving", "store", "tinker_client"),
        ),
        ("kept_engine", "replaced_engine"),
        ("adapter_runner", "game", "training_runner"),
        ("adapter_engine", "engine"),
        ("api_store", "engine_runner"),
        ("inference_runner", "job_runner"),
        ("service_usage",),
        ("service_jobs",),
        ("opentinker.callers",),
        ("opentinker", "tinker_api"),
        ("operations",),
        ("service",),
    ),
    "v2": (
        ("flops", "subprocesses"),
        ("types",),
        ("job",),
        ("interface",),
        ("fray", "iris", "local_backend", "ray_backend"),
        ("actor", "iris_backend"),
        ("client",),
        ("marin",),
    ),
}
"""Package with sub-packages: its parts in layers, lowest first. A part imports parts of lower layers only. A module of
a sub-package is a part of its own where it has another layer than the rest."""
MODULES_LIMIT = 20
"""Modules in one folder, ``__init__`` not counted."""
LINES_LIMIT = 700
"""Lines of one module."""
FACES = ("api/", "blocking/", "aio/", "v2/", "job/")
"""Packages that mirror one another: the same class on Trio, for sync code, on asyncio, for Marin's and plain code."""
MAP_LINES = range(5, 16)
"""Lines of the docstring of a package: what lives where, and in which order it depends."""


def module_of(path: Path) -> str:
    """``fray.net.codec`` of its file; a package has the name of its folder."""
    return ".".join(("fray", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module: the modules among ``sources`` that it imports anywhere, for annotations and inside functions included."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        targets = (name if name in sources else name.rpartition(".")[0] for name, _, _ in imports(ast.parse(source)))
        graph[module] = {target for target in targets if target in sources and target != module}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules of which each imports, directly or not, all the others (Tarjan, 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return found


def layer_violations(graph: Mapping[str, set[str]], layers: Mapping[str, Sequence[Sequence[str]]]) -> Iterator[str]:
    """Sentences about imports inside a package that do not lead to a lower layer, and parts that have no layer."""
    level = {
        f"fray.{top}.{part}": number
        for top, of_top in layers.items()
        for number, parts in enumerate(of_top)
        for part in parts
    }

    def part_of(module: str) -> str:
        return module if module in level else ".".join(module.split(".")[:3])

    for module, targets in sorted(graph.items()):
        part = part_of(module)
        if module.count(".") < 2 or module.split(".")[1] not in layers:
            continue
        if part not in level:
            yield f"{part} is in no layer of tests/test_layout.py"
            continue
        for target in sorted(targets):
            other = part_of(target)
            is_inside = other.startswith(f"fray.{module.split('.')[1]}.") and other != part and other in level
            if is_inside and level[other] >= level[part]:
                yield f"{module} imports {target}, which is not in a lower layer"


def fray_sources() -> dict[str, str]:
    return {module_of(path): path.read_text() for path in ROOT.rglob("*.py")}


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(import_graph(fray_sources())) == []


def test_parts_of_a_package_import_parts_of_lower_layers() -> None:
    found = list(layer_violations(import_graph(fray_sources()), LAYERS))
    assert not found, "\n" + "\n".join(found)


def test_each_layer_names_parts_that_exist() -> None:
    for top, layers in LAYERS.items():
        for part in (part for layer in layers for part in layer):
            assert (ROOT / top / part).is_dir() or (ROOT / top / f"{part.replace('.', '/')}.py").is_file(), (
                f"{top}/{part}"
            )


def test_a_circle_through_a_late_import_and_one_for_annotations_is_found() -> None:
    late = "def f():\n    from fray.b import y"
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fray.a import x"
    assert circles(import_graph({"fray.a": late, "fray.b": typed, "fray.c": "import fray.a"})) == [["fray.a", "fray.b"]]


def test_an_import_of_a_higher_layer_and_a_part_without_a_layer_are_found() -> None:
    graph = import_graph({"fray.p.low": "import fray.p.high", "fray.p.high": "", "fray.p.new": ""})
    assert list(layer_violations(graph, {"p": (("low",), ("high",))})) == [
        "fray.p.low imports fray.p.high, which is not in a lower layer",
        "fray.p.new is in no layer of tests/test_layout.py",
    ]


def test_class_names_are_unique_outside_the_faces() -> None:
    exported = set(public_names.__all__)
    places: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    twice = []
    for name, paths in places.items():
        below = [path for path in paths if not path.startswith(FACES)]
        mirrored = (name in exported and len(below) == 1) or not below
        if len(paths) > 1 and not mirrored:
            twice.append(f"{name}: {', '.join(paths)}")
    assert not twice, "\n" + "\n".join(twice)


def test_folders_and_modules_are_of_a_size_one_can_survey() -> None:
    folders = [path for path in [ROOT, *ROOT.rglob("*")] if path.is_dir() and path.name != "__pycache__"]
    crowded = {str(path): len(list(path.glob("*.py"))) - 1 for path in folders}
    assert not {path: count for path, count in crowded.items() if count > MODULES_LIMIT}
    lengths = {path.as_posix(): len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert not {path: length for path, length in lengths.items() if length > LINES_LIMIT}


def test_each_package_says_what_lives_where() -> None:
    found = []
    for path in sorted(ROOT.rglob("__init__.py")):
        lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
        if len(lines) not in MAP_LINES:
            found.append(f"{path.relative_to(ROOT)}: {len(lines)} lines")
    assert not found, "\n" + "\n".join(found)


def test_no_two_files_of_tests_have_one_name() -> None:
    # Folders of tests are not packages: pytest imports each file by its name alone.
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_the_tests_mirror_the_package() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir()}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and list(path.glob("*.py"))}
    assert folders <= packages | BESIDE_PACKAGES
    loose = {path.name for path in TESTS.glob("test_*.py")}
    assert loose <= WHOLE_PROJECT
