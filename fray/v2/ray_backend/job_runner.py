"""Ray task that runs a job once: it prepares the process, runs the code and reports the result."""

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
from fray.v2.types import BinaryEntrypoint, Entrypoint


def run_job(spec: RayJobSpec, registry: Any, work: list[Any], member: Member | None = None) -> None:
    """Run the job. Its return value is dropped.

    Raises:
        RetryableError: the job failed and may restart; Ray restarts it.
        PickledError: the job failed.
    """
    if not ray.get(registry.began.remote(spec.job_id)):
        return
    process_context.enter(spec.job_id, registry)
    failure: PickledError | None = None
    with (
        _capture_output(registry, spec, member),
        _variables(member.variables if member else {}),
        _in_directory(spec.directory),
    ):
        try:
            client, entry = ray.get(work[0])
            copy_context().run(_run_entrypoint, client, entry)
        except BaseException as error:  # noqa: BLE001 (also SystemExit: the job has ended, not Ray's process)
            failure = None if isinstance(error, SystemExit) and not error.code else packed(error)
        finally:
            process_context.leave()
    ray.get(registry.printed.remote(spec.job_id, ""))  # its answer comes after all output sent before
    if failure is not None:
        raise classify_failure(spec, registry, failure) if member is None else failure


def classify_failure(spec: RayJobSpec, registry: Any, failure: PickledError) -> PickledError:
    """Return the error to raise after a failure of the job's own code; the registry counts whether it may restart."""
    if ray.get(registry.count_failure.remote(spec.job_id)):
        return RetryableError(failure.packed, failure.text, failure.trace)
    return failure


def _run_entrypoint(client: Any, entry: Entrypoint) -> None:
    # In a copy of the context: Ray reuses this process for other jobs.
    _current_client_var.set(client)
    if (call := entry.callable_entrypoint) is not None:
        call.callable(*call.args, **call.kwargs)
    elif entry.binary_entrypoint is not None:
        _run_program(entry.binary_entrypoint)


def _run_program(entry: BinaryEntrypoint) -> None:
    """Run a program as a child of this process, so that Ray ends it with the process."""
    argv = [entry.command, *entry.args]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)


# Environment ---------------------------------------------------------------------------------------------------------


def _capture_output(registry: Any, spec: RayJobSpec, member: Member | None) -> Output:
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
    """Set variables in the ``with`` block, and restore them after it, as the process may run another job next."""
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
def _in_directory(directory: str | None) -> Iterator[None]:
    """Work in a directory in the ``with`` block, and import from it."""
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
