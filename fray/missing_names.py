"""Names of other interfaces: the error of an attribute that is missing, or of a cluster of another interface.

What is missing is often what other interfaces of Fray, or other libraries, call the same thing: ``cluster.run(f)``,
``job.result()``, ``method.remote(...)``. The error names the line that was meant, or similar names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fray.errors import InvalidRequest
from fray.model.text import near_text

_LAUNCH = "JobRequest('a-name', entrypoint=Entrypoint.from_callable(function, args=(...)))"

CLUSTER_LINES = {
    "run": "`async with cluster.open_scope() as scope:`, and in it `await scope.run(function, ...)`",
    "submit": f"`await cluster.launch({_LAUNCH})`",
    "get": "`await job.wait()`",
    "wait_all": "`await cluster.wait([job, ...])`",
}
"""Lines to write instead of attributes that `fray.Cluster` does not have; so below for other classes."""
SCOPE_LINES = {
    "submit": f"`await scope.run(function, ...)`, or `await scope.launch({_LAUNCH})`",
    "start_soon": f"`await scope.launch({_LAUNCH})`",
    "wait": "`await job.wait()`; leaving the scope waits for all its jobs",
}
JOB_LINES = {
    "result": "`await job.wait()`",
    "get": "`await job.wait()`",
    "status": "`job.info.state`",
    "state": "`job.info.state`",
    "cancel": "`await job.terminate()`",
    "stop": "`await job.terminate()`",
}
METHOD_LINES = dict.fromkeys(
    ("remote", "submit"), "`future = actor.method.start(...)`, and `await future` for the result"
)
BLOCKING_METHOD_LINES = dict.fromkeys(
    ("start", "submit"), "`future = actor.method.remote(...)`, and `future.result()` for the result"
)
MODULE_LINES = {"wait_all": "`await cluster.wait([job, ...])`"}
V2_CLIENT_LINES = dict.fromkeys(
    ("run", "launch", "map"),
    "`client.submit(JobRequest(name='a-name', entrypoint=Entrypoint.from_callable(function, args=(...))))`",
)


def blocking_lines(lines: Mapping[str, str]) -> dict[str, str]:
    """Return the same lines for `fray.blocking`."""
    return {name: line.replace("async ", "").replace("await ", "") for name, line in lines.items()}


def missing_name(owner: str, name: str, names: list[str], meant: Mapping[str, str]) -> AttributeError:
    """Return the error of a missing attribute.

    Args:
        owner: what does not have it: ``"module 'fray'"``.
        names: attributes that it has.
        meant: lines to write instead of some that it does not have.
    """
    hint = f": write {meant[name]}" if name in meant else near_text(name, [each for each in names if each[:1] != "_"])
    # With ``obj``, Python does not add a suggestion of its own to ours.
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", obj=None)


class ExplainsMissing:
    """Base of public classes: an attribute that one does not have is an error with the line that was meant."""

    __slots__ = ()

    _meant: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # with it, type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):  # asked for by libraries: cheap
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise missing_name(f"{type(self).__name__!r} object", name, dir(self), self._meant)


def check_interface(cluster: object, expected: str, name: str) -> None:
    """Check that a cluster is of the interface ``expected`` (``"fray.aio"``), of which ``name`` is a class.

    Raises:
        InvalidRequest: it is of another one, or no cluster at all; the message says the line that was meant.
    """
    package, _, rest = type(cluster).__module__.partition(".")
    part = rest.partition(".")[0]
    found = f"fray.{part}" if part in ("blocking", "aio") else "fray"
    if package != "fray" or part == "v2":
        raise InvalidRequest(f"{name} needs a cluster, not a {type(cluster).__name__}: write {name}(cluster, ...)")
    if found != expected:
        raise InvalidRequest(f"this cluster is of {found}: write {found}.{name}(cluster, ...)")
