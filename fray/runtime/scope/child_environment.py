"""What the process of a new job is made of, as its author's place in the cluster decides it: its parent's packages, and
whether the cluster has processes at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from fray.errors import InvalidRequest
from fray.model.environment import UNSENT, EnvironmentSpec
from fray.model.specs import JobSpec
from fray.runtime.runtime import Runtime

_NEED_PROCESSES = ("extras", "pip_packages", "docker_image")


async def prepare_specs(runtime: Runtime, specs: Sequence[JobSpec]) -> Sequence[JobSpec]:
    """The specs as they leave. What they need of this machine (workspaces) has gone ahead.

    A child that says nothing of packages has its parent's: its code imports them.

    Raises:
        InvalidRequest: a local cluster cannot give what is asked for, or a workspace cannot travel.
        StoreError: the controller has no room for a workspace.
    """
    specs = [_inherited(spec, runtime.environment) for spec in specs]
    if any(_asked(spec) for spec in specs):
        await runtime.link.ready.wait()
        controller = runtime.link.controller
        if controller is not None and controller.in_place:
            _refuse(specs)
    if not runtime.bundle and all(spec.environment.bundle is None for spec in specs):
        return specs
    from fray.runtime.workspaces.upload import bundle_workspaces  # reads files and asks git: of no use to most

    return await bundle_workspaces(runtime, specs)


def _inherited(spec: JobSpec, parent: EnvironmentSpec) -> JobSpec:
    own = spec.environment
    if _asked(spec) or (own.bundle is not None and own.bundle.startswith(UNSENT)):
        return spec
    if not (parent.extras or parent.pip_packages or parent.docker_image):
        return spec
    extras, packages, image = parent.extras, parent.pip_packages, parent.docker_image
    environment = evolve(own, extras=extras, pip_packages=packages, docker_image=image)
    return evolve(spec, environment=environment, demand=evolve(spec.demand, containers=image is not None))


def _asked(spec: JobSpec) -> list[str]:
    return [name for name in _NEED_PROCESSES if getattr(spec.environment, name)]


def _refuse(specs: Sequence[JobSpec]) -> None:
    for spec in specs:
        asked = _asked(spec)
        if asked:
            raise InvalidRequest(
                f"job {spec.name!r}: {' and '.join(asked)} cannot be had in a local cluster, whose jobs run in this "
                "very process: install them here, or open_cluster('machine')"
            )
