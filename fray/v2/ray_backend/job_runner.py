"""What a Ray task of ours does: it enters the job's place, runs its code once, and says how that went."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

import ray

from fray.v2.interface import _current_client_var
from fray.v2.ray_backend import process_context
from fray.v2.ray_backend.errors import PickledError, RetryableError, packed
from fray.v2.ray_backend.output_capture import Output
from fray.v2.ray_backend.specs import Member, RayJobSpec
from fray.v2.types import BinaryEntrypoint, CallableEntrypoint, Entrypoint


def run_job(spec: RayJobSpec, registry: Any, work: list[Any], member: Member | None = None) -> None:
    """Run it. It returns nothing: results of jobs are not used.

    Raises:
        Again: it failed, and may begin again: Ray does that.
        Carried: it failed.
    """
    if not ray.get(registry.began.remote(spec.job_id)):
        return
    process_context.enter(spec.job_id, registry)
    failure: PickledError | None = None
    with _told_to(registry, spec, member), _variables(member.variables if member else {}), _inside(spec.directory):
        try:
            client, entry = ray.get(work[0])
            copy_context().run(_run, client, entry)
        except BaseException as error:  # noqa: BLE001 (also SystemExit: the job has ended, not Ray's process)
            failure = None if isinstance(error, SystemExit) and not error.code else packed(error)
        finally:
            process_context.leave()
    ray.get(registry.printed.remote(spec.job_id, ""))  # so all of its output is there before its end
    if failure is not None:
        raise classify_failure(spec, registry, failure) if member is None else failure


def classify_failure(spec: RayJobSpec, registry: Any, failure: PickledError) -> PickledError:
    """After a failure of its own code: whether it begins again is the registry's to count."""
    if ray.get(registry.failed_and_may_begin_again.remote(spec.job_id)):
        return RetryableError(failure.packed, failure.text, failure.trace)
    return failure


def _run(client: Any, entry: Entrypoint) -> None:
    _current_client_var.set(client)
    if entry.callable_entrypoint is not None:
        _call(entry.callable_entrypoint)
    elif entry.binary_entrypoint is not None:
        _start(entry.binary_entrypoint)


def _call(entry: CallableEntrypoint) -> None:
    entry.callable(*entry.args, **entry.kwargs)


def _start(entry: BinaryEntrypoint) -> None:
    """A program, as a child of this process: Ray ends it with the process."""
    argv = [entry.command, *entry.args]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)


# The place -----------------------------------------------------------------------------------------------------------


def _told_to(registry: Any, spec: RayJobSpec, member: Member | None) -> Output:
    in_line = False  # `print` writes a line and its end separately, and a flush may come between them

    def send(text: str) -> None:
        nonlocal in_line
        if member is not None:
            lines = [f"[{member.index}] {line}" for line in text.splitlines(True)]
            if in_line:
                lines[0] = lines[0].removeprefix(f"[{member.index}] ")
            text, in_line = "".join(lines), not text.endswith("\n")
        registry.printed.remote(spec.job_id, text)

    return Output(send)


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Ray's process may run another job next: it gets back what it had."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _inside(directory: str | None) -> Iterator[None]:
    """Work in a directory, and import from it."""
    if directory is None:
        yield
        return
    before = os.getcwd()
    os.chdir(directory)
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        if directory in sys.path:
            sys.path.remove(directory)
        os.chdir(before)
