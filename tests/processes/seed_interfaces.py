"""The interfaces of Fray-Zero beside ours: each name, parameter, order and default."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))

from dataset_backend import FrayBackend
from fray import blocking
from fray.blocking import JobState, ResourceConfig

ON_PURPOSE = {
    "TpuConfig(kind)": "the seed's order is impossible: in a dataclass no field without a default follows one with",
    "TpuConfig(variant)": "likewise",
    "TpuConfig(count)": "likewise",
    "GpuConfig(kind)": "likewise",
    "GpuConfig(variant)": "likewise",
    "GpuConfig(count)": "likewise",
    "ResourceConfig.memory": "None: 2 GB are reserved and nothing is limited; what is written is also a limit",
    "ResourceConfig.with_cpu(memory)": "likewise",
    "ResourceConfig.with_gpu(memory)": "likewise, 16 GB",
    "ReservationInfo(allocated_resources)": "clusters alone make it: it is counted from what is held",
    "ReservationInfo(pending_resources)": "likewise",
    "ReservationInfo(jobs)": "likewise",
    "ReservationInfo(expires_at)": "likewise",
    "Metadata.register": "ActorServer.register does it: a name without an object to call would lead nowhere",
    "Metadata.unregister": "ActorServer.unregister does it, and the end of the job",
    "ActorServer(host)": "other machines reach it only where there is TLS (P9)",
}
"""Intended differences, and their reasons (also in docs/blocking.md)."""

INSTANCES: dict[str, Any] = {
    "CpuConfig": blocking.CpuConfig(),
    "TpuConfig": blocking.TpuConfig("v5litepod-16"),
    "GpuConfig": blocking.GpuConfig("h100"),
    "ResourceConfig": ResourceConfig(),
    "Entrypoint": blocking.Entrypoint(print),
    "EnvironmentConfig": blocking.EnvironmentConfig(),
    "JobRequest": blocking.JobRequest("train", ResourceConfig(), blocking.Entrypoint(print)),
    "JobGroupConfig": blocking.JobGroupConfig("group"),
    "JobInfo": blocking.JobInfo(job_id="train-1", name="train", state=JobState.PENDING),
    "ReservationConfig": blocking.ReservationConfig(ResourceConfig(), ResourceConfig()),
    "ActorEndpoint": blocking.ActorEndpoint(actor_id="a-1", name="a", job_id="train-1", namespace="n"),
}
"""An instance of each dataclass, made without its optional arguments, to compare the defaults."""
EXAMPLES = {"FrayBackend": FrayBackend}
EMPTY = object()


def differences(source: str) -> dict[str, str]:
    """Return the names of the seed that `fray.blocking` lacks or has otherwise, with what it has instead."""
    found: dict[str, str] = {}
    for node in ast.parse(source).body:
        found |= dict(_of_statement(node))
    return found


def _of_statement(node: ast.stmt) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.ClassDef):
        ours = EXAMPLES.get(node.name) or getattr(blocking, node.name, None)
        if ours is None:
            yield node.name, "missing"
            return
        yield from _of_class(node, ours)
    elif isinstance(node, ast.FunctionDef):
        yield from _parameters(node.name, node, getattr(blocking, node.name, None))
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id[1:]:
        name = node.targets[0].id
        if name[0].isupper() and not hasattr(blocking, name):
            yield name, "missing"


def _of_class(node: ast.ClassDef, ours: Any) -> Iterator[tuple[str, str]]:
    fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
    if fields:
        yield from _fields(node.name, fields, ours)
    for one in node.body:
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):  # of an enum
            if ours[one.targets[0].id] != ast.literal_eval(one.value):
                yield f"{node.name}.{one.targets[0].id}", str(ours[one.targets[0].id])
        elif isinstance(one, ast.FunctionDef):
            yield from _method(node.name, one, ours)


def _method(owner: str, node: ast.FunctionDef, ours: Any) -> Iterator[tuple[str, str]]:
    is_init = node.name == "__init__"
    method = ours if is_init else getattr(ours, node.name, None)
    name = owner if is_init else f"{owner}.{node.name}"
    if any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
        if not isinstance(method, property):
            yield name, "no property"
    elif method is None and not is_init:
        yield name, "missing"
    else:
        yield from _parameters(name, node, method)


def _parameters(name: str, node: ast.FunctionDef, ours: Any) -> Iterator[tuple[str, str]]:
    """Ours may have more behind theirs, with defaults; and a default where they have none."""
    args = [one for one in node.args.args if one.arg not in ("self", "cls")]
    defaults = [EMPTY] * (len(args) - len(node.args.defaults)) + [ast.literal_eval(one) for one in node.args.defaults]
    have = [] if ours is None else _own(ours)
    for index, (arg, default) in enumerate(zip(args, defaults, strict=True)):
        mine = have[index] if index < len(have) else None
        if mine is None or mine.name != arg.arg:
            yield f"{name}({arg.arg})", "missing" if mine is None else f"{mine.name} stands there"
        elif default is not EMPTY and mine.default != default:
            yield f"{name}({arg.arg})", f"{mine.default!r} is the default"
    for more in have[len(args) :]:
        if more.default is inspect.Parameter.empty and more.kind is not inspect.Parameter.VAR_KEYWORD:
            yield f"{name}({more.name})", "has to be given"


def _own(ours: Any) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(ours).parameters.values())
    return [one for one in parameters if one.name != "self" and one.kind is not inspect.Parameter.VAR_POSITIONAL]


def _fields(owner: str, fields: list[ast.AnnAssign], ours: Any) -> Iterator[tuple[str, str]]:
    """Return the fields of a dataclass, which are the parameters of its constructor."""
    have = [] if ours is None else [one.name for one in _own(ours)]
    for index, field in enumerate(fields):
        assert isinstance(field.target, ast.Name)
        name = field.target.id
        if have[index : index + 1] != [name]:
            yield f"{owner}({name})", f"{(have[index:] or ['nothing'])[0]} stands there"
        if field.value is not None and owner in INSTANCES:
            mine, theirs = getattr(INSTANCES[owner], name), _default(field.value)
            if (list(mine) if isinstance(mine, tuple) and isinstance(theirs, list) else mine) != theirs:
                yield f"{owner}.{name}", f"{mine!r} is the default"


def _default(node: ast.expr) -> Any:
    """A literal, or what the ``default_factory`` makes."""
    if isinstance(node, ast.Call):
        factory = ast.unparse(node.keywords[0].value)
        made = {"list": list, "dict": dict}.get(factory) or getattr(blocking, factory)
        return made()
    return ast.literal_eval(node)
