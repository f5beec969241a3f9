"""Many jobs of one request, and jobs under ids or names that may be taken already by the same request."""

from __future__ import annotations

from attrs import evolve

from fray.errors import InvalidRequest
from fray.model.ids import JobId, mint_job_id
from fray.model.policy.name_templates import common_part, expand
from fray.model.specs import JobSpec
from fray.runtime.runtime import Runtime


def expand_request(
    built: JobSpec, runtime: Runtime, count: int | None, name: str | None, job_id: JobId | None, adopt_existing: bool
) -> list[JobSpec]:
    """The jobs that a launch of ``built`` asks for, in order.

    Raises:
        InvalidRequest: an impossible name, count or id.
    """
    specs = [built] if count is None and name is None else _named(built, runtime, count, name)
    if job_id is not None:
        if count is not None:
            raise InvalidRequest("job_id= is for one job: with count= each has its own, find them by their names")
        specs = [evolve(specs[0], job_id=_checked(job_id, specs[0].name))]
    return [evolve(spec, adopt_existing=adopt_existing) for spec in specs] if adopt_existing else specs


def _named(built: JobSpec, runtime: Runtime, count: int | None, name: str | None) -> list[JobSpec]:
    pattern = name if name is not None else f"{built.name}/{{index}}"
    if not isinstance(pattern, str):
        raise InvalidRequest(f"name={name!r} must be a text such as '{{user}}/rollout/{{index}}'")
    names = expand(pattern, count, runtime.user)
    namespace = built.namespace
    if built.detached and namespace == built.name:  # a root: what are launched together live together
        namespace = names[0] if count is None else common_part(pattern, runtime.user)
    return [
        evolve(built, job_id=mint_job_id(each, runtime.rng), name=each, namespace=namespace, index=index)
        for index, each in enumerate(names)
    ]


def _checked(job_id: JobId, name: str) -> JobId:
    token = job_id.removeprefix(f"{name}-") if isinstance(job_id, str) else ""
    if token == job_id or not (token.isascii() and token.isalnum() and len(token) <= 40):
        raise InvalidRequest(
            f"job_id={job_id!r} must be the job's name, a dash, and 1 to 40 letters or digits: {name + '-run1'!r}"
        )
    return job_id
