"""Environment of a child job: inherited packages, workspaces to upload, and the limits of local clusters."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from fray.errors import InvalidRequest
from fray.model.environment import UNSENT, EnvironmentSpec
from fray.model.specs import JobSpec
from fray.runtime.runtime import Runtime

_NEED_PROCESSES = ("extras", "pip_packages", "docker_image")


async def prepare_specs(runtime: Runtime, specs: Sequence[JobSpec]) -> Sequence[JobSpec]:
    """Return the specs ready to send, after uploading the workspaces of this machine that they need.

    A child that names no packages inherits its parent's, since its code imports them.

    Raises:
        InvalidRequest: a local cluster cannot provide what a spec requests, or a workspace cannot be sent.
        StoreError: the controller has no room for a workspace.
    """
    specs = [_inherit_packages(spec, runtime.environment) for spec in specs]
    # Connecting is delayed until it is needed: most jobs of a local cluster ask for none of these.
    if any(_needs_process(spec) for spec in specs):
        controller = await runtime.client.connect()
        if controller is not None and controller.in_place:
            _check_local(specs)
    if not runtime.bundle and all(spec.environment.bundle is None for spec in specs):
        return specs
    from fray.runtime.workspaces.upload import bundle_workspaces  # late: most processes never upload a workspace

    return await bundle_workspaces(runtime, specs)


def _inherit_packages(spec: JobSpec, parent: EnvironmentSpec) -> JobSpec:
    own = spec.environment
    # Not for a child with a workspace of its own, which is another project.
    if _needs_process(spec) or (own.bundle is not None and own.bundle.startswith(UNSENT)):
        return spec
    if not (parent.extras or parent.pip_packages or parent.docker_image):
        return spec
    extras, packages, image = parent.extras, parent.pip_packages, parent.docker_image
    environment = evolve(own, extras=extras, pip_packages=packages, docker_image=image)
    # The demand has to follow: the child now fits only machines with a container engine.
    return evolve(spec, environment=environment, demand=evolve(spec.demand, containers=image is not None))


def _needs_process(spec: JobSpec) -> list[str]:
    """Return the names of the fields set in ``spec`` that only a process of its own can have."""
    return [name for name in _NEED_PROCESSES if getattr(spec.environment, name)]


def _check_local(specs: Sequence[JobSpec]) -> None:
    for spec in specs:
        fields = _needs_process(spec)
        if fields:
            raise InvalidRequest(
                f"job {spec.name!r}: {' and '.join(fields)} not supported in a local cluster, whose jobs run in this "
                "process: install them here, or use open_cluster('machine')"
            )
