"""The cluster and the job that a command names: connecting as a tool, which owns nothing, and finding jobs by name."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fray.api.cluster import Cluster, cluster_of
from fray.deploy import daemons, stored_keys
from fray.deploy.cluster_spec import Spec, parse_spec
from fray.deploy.remote import open_remote
from fray.errors import InvalidRequest, NoSuchJob
from fray.model.ids import JobId
from fray.model.log_records import LogLine
from fray.model.messages.client import Role
from fray.model.specs import JobInfo, JobState
from fray.net.cluster_token import TOKEN_FILE_VARIABLE

NAMED_LIMIT = 10
"""Maximum number of jobs listed in an error or a question."""


@asynccontextmanager
async def open_target(
    options: argparse.Namespace,
    *,
    role: Role = Role.TOOL,
    launches: bool = False,
    on_log: Callable[[Sequence[LogLine]], None] | None = None,
) -> AsyncIterator[Cluster]:
    """Connect to the cluster of the options.

    Args:
        launches: jobs are launched, in ``--namespace``; for other tools that says where names are looked for.

    Raises:
        InvalidRequest: none is named, it exists only within its driver, or there is no token.
        ConnectionFailed: it cannot be reached, or refuses the connection.
    """
    spec = spec_of(options)
    namespace = options.namespace if launches else None
    async with open_remote(
        spec.address, namespace=namespace, token=token_of(options), on_log=on_log, role=role
    ) as runtime:
        yield cluster_of(runtime)


def spec_of(options: argparse.Namespace) -> Spec:
    """Return the spec of the cluster. Raises InvalidRequest."""
    text = options.cluster or os.environ.get("FRAY_CLUSTER_SPEC", "") or stored_keys.default_spec()
    if not text:
        running = daemons.find_running()
        text = running.spec if running is not None else ""
    if not text:
        raise InvalidRequest(
            "no cluster given: use --cluster fray://host:port, set FRAY_CLUSTER_SPEC, `fray login fray://host:port`, "
            "or start one on this machine with `fray up`"
        )
    spec = parse_spec(text)
    if spec.kind != "fray":
        raise InvalidRequest(
            f"a {spec.kind!r} cluster exists only within its driver: this command needs a controller, as "
            "fray://host:port (see docs/daemons.md)"
        )
    return spec


def token_of(options: argparse.Namespace) -> str | None:
    """Return the token in the file of ``--token-file``, or of the cluster that ``fray up`` has started; None: the token
    of the environment, or the key of ``fray login``, is used. Raises InvalidRequest.
    """
    file: str | Path | None = options.token_file
    if file is None:
        address = spec_of(options).address
        if has_token() or stored_keys.find_key(address) is not None:
            return None
        running = daemons.find_running()
        if running is None or parse_spec(running.spec).address != address:
            raise InvalidRequest(
                "authentication required: `fray login` with an invitation, set FRAY_TOKEN, or use --token-file FILE "
                "(fray-controller prints its path)"
            )
        file = running.token_file
    try:
        token = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the token file {file} cannot be read: {error}") from None
    if not token:
        raise InvalidRequest(f"the token file {file} is empty")
    return token


def has_token() -> bool:
    """Return whether the environment has a token, which comes before the key of ``fray login``."""
    return any(os.environ.get(name, "").strip() for name in ("FRAY_TOKEN", TOKEN_FILE_VARIABLE))


def namespace_of(options: argparse.Namespace) -> str:
    """Return the namespace of names; ``"*"`` for all."""
    if getattr(options, "all_namespaces", False):
        return "*"
    return options.namespace or os.environ.get("FRAY_NAMESPACE") or "*"


async def find(cluster: Cluster, text: str, options: argparse.Namespace) -> JobInfo:
    """Return the job that ``text`` names.

    Raises:
        NoSuchJob: none.
        InvalidRequest: several.
    """
    if not text:
        raise InvalidRequest("no job given: write its id or its name")
    # With a prefix, so that the error can list the jobs that may have been meant.
    found = await cluster.list_jobs(namespace_of(options), prefix=text)
    return choose(text, found)


async def find_running(cluster: Cluster, options: argparse.Namespace, rule: str) -> JobInfo:
    """Return the running job that the options name.

    Raises:
        NoSuchJob: none.
        InvalidRequest: several, or a job in another state, with the ``rule``.
    """
    info = await find(cluster, options.job, options)
    if info.state is not JobState.RUNNING:
        raise InvalidRequest(f"job {info.job_id} is {info.state.value}: {rule}")
    return info


def choose(text: str, found: Sequence[JobInfo]) -> JobInfo:
    """Choose among jobs, oldest first: the job of this id, else the living one of exactly this name, else the last that
    has ended. Raises as `find`.
    """
    for info in found:
        if info.job_id == text:
            return info
    named = [info for info in found if info.name == text]
    living = [info for info in named if not info.state.finished]
    if len(living) > 1:
        raise InvalidRequest(
            f"{text!r} is the name of {len(living)} living jobs: write an id, or --namespace\n{listed(living)}"
        )
    if named:
        return (living or named)[-1]
    # A beginning is not taken for a name: `fray stop p` must not stop `prod/trainer`.
    begins = f"; these begin with it:\n{listed(found)}" if found else "; `fray jobs` lists all"
    raise NoSuchJob(f"no job with the id or name {text!r}{begins}", name=text)


def listed(infos: Sequence[JobInfo]) -> str:
    """Return a line for each of the newest jobs, and how many are left out."""
    lines = [
        f"  {info.job_id}  ({info.name}, {info.state.value}, namespace {info.namespace})"
        for info in infos[-NAMED_LIMIT:]
    ]
    if len(infos) > NAMED_LIMIT:
        lines.append(f"  and {len(infos) - NAMED_LIMIT} more")
    return "\n".join(lines)


async def find_all(cluster: Cluster, texts: Sequence[str], options: argparse.Namespace) -> list[JobId]:
    """Return the ids, in order. Raises as `find`."""
    return [(await find(cluster, text, options)).job_id for text in texts]
