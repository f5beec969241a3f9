"""Which cluster a command means, and which job: connecting as a tool, which owns nothing, and finding by name."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fray.api.cluster import Cluster, cluster_of
from fray.deploy.connect import Spec, open_remote, parse_spec
from fray.errors import InvalidRequest, NoSuchJob
from fray.model.ids import JobId
from fray.model.log_records import LogLine
from fray.model.messages.client import Role
from fray.model.specs import JobInfo

NAMED_LIMIT = 10
"""Candidates of an ambiguous name that are listed."""


@asynccontextmanager
async def open_place(
    options: argparse.Namespace,
    *,
    role: Role = Role.TOOL,
    on_log: Callable[[Sequence[LogLine]], None] | None = None,
) -> AsyncIterator[Cluster]:
    """The cluster that the options mean.

    Raises:
        InvalidRequest: none, one that lives only in its driver, or no token.
        ConnectionFailed: it is not there, or refuses us.
    """
    spec = spec_of(options)
    namespace = options.namespace if role is Role.DRIVER else None
    async with open_remote(
        spec.address, namespace=namespace, token=token_of(options), on_log=on_log, role=role
    ) as runtime:
        yield cluster_of(runtime)


def spec_of(options: argparse.Namespace) -> Spec:
    """Raises InvalidRequest."""
    text = options.cluster or os.environ.get("FRAY_CLUSTER_SPEC", "")
    if not text:
        raise InvalidRequest("which cluster? Say --cluster fray://host:port, or set FRAY_CLUSTER_SPEC")
    spec = parse_spec(text)
    if spec.kind != "fray":
        raise InvalidRequest(
            f"a {spec.kind!r} cluster lives in its driver alone: this command needs a running one, as fray://host:port "
            "(see docs/daemons.md)"
        )
    return spec


def token_of(options: argparse.Namespace) -> str | None:
    """The one in the file named on the command line; None: that of the environment. Raises InvalidRequest."""
    if options.token_file is None:
        if not os.environ.get("FRAY_TOKEN", "").strip():
            raise InvalidRequest(
                "there is no token: set FRAY_TOKEN or say --token-file FILE; fray-controller says where it is"
            )
        return None
    try:
        token = Path(options.token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the token file {options.token_file} cannot be read: {error}") from None
    if not token:
        raise InvalidRequest(f"the token file {options.token_file} is empty")
    return token


def namespace_of(options: argparse.Namespace) -> str:
    """``"*"`` for all."""
    if getattr(options, "all_namespaces", False):
        return "*"
    return options.namespace or os.environ.get("FRAY_NAMESPACE") or "*"


async def find(cluster: Cluster, text: str, options: argparse.Namespace) -> JobInfo:
    """The job that ``text`` means.

    Raises:
        NoSuchJob: none.
        InvalidRequest: several.
    """
    if not text:
        raise InvalidRequest("which job? Say its id, its name, or the beginning of either")
    found = await cluster.list_jobs(namespace_of(options), prefix=text)
    return choose(text, found)


def choose(text: str, found: Sequence[JobInfo]) -> JobInfo:
    """The one that is meant, of those whose ids begin with ``text``, oldest first: by id, else by exact name, else the
    only one; of several, the living one; of dead ones of one name, the last. Raises as `find`."""
    for fits in (lambda info: info.job_id == text, lambda info: info.name == text, lambda info: True):
        fitting: list[JobInfo] = [info for info in found if fits(info)]
        living = [info for info in fitting if not info.state.finished]
        candidates = living or fitting
        if len(candidates) == 1 or (fitting and not living and len({_place(info) for info in fitting}) == 1):
            return candidates[-1]
        if candidates:
            raise _ambiguous(text, candidates)
    raise NoSuchJob(f"no job is called {text!r}, or begins so; `fray jobs` lists them", name=text)


def _place(info: JobInfo) -> tuple[str, str]:
    return info.namespace, info.name


def _ambiguous(text: str, candidates: Sequence[JobInfo]) -> InvalidRequest:
    listed = "\n".join(
        f"  {info.job_id}  ({info.state.value}, namespace {info.namespace})" for info in candidates[-NAMED_LIMIT:]
    )
    more = f"\n  and {len(candidates) - NAMED_LIMIT} more" if len(candidates) > NAMED_LIMIT else ""
    return InvalidRequest(f"{text!r} can be one of {len(candidates)} jobs: write more of it, or the id\n{listed}{more}")


async def find_all(cluster: Cluster, texts: Sequence[str], options: argparse.Namespace) -> list[JobId]:
    """Ids, in order. Raises as `find`."""
    return [(await find(cluster, text, options)).job_id for text in texts]
