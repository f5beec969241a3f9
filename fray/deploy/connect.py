"""Choice among the kinds of clusters, by a spec such as ``machine?nodes=2`` or ``fray://host:port``.

Nothing heavy is imported here before the processes of a new cluster have been started.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from fray.deploy.cluster_spec import Spec
from fray.deploy.node_process import open_node_processes
from fray.errors import InvalidRequest
from fray.model.environment import EnvironmentConfig, plain_variables
from fray.model.ids import Namespace

if TYPE_CHECKING:
    from fray.model.policy.policy import Policy
    from fray.runtime.runtime import Runtime


def open_by_spec(
    spec: Spec,
    *,
    namespace: Namespace | None,
    token: str | None,
    logs: bool,
    grace_s: float | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> AbstractAsyncContextManager[Runtime]:
    """Return the context manager of a driver's runtime in the cluster of the spec.

    Raises:
        InvalidRequest: the policy or an option is invalid.
    """
    variables = plain_variables(EnvironmentConfig.create(env_vars=env_vars).env_vars)
    policy = _policy(spec.policy)
    if spec.kind == "machine":
        return _open_machine(spec, namespace, logs, variables, policy)
    # Imported when chosen: a driver of a running cluster needs neither node nor controller code.
    from fray.runtime.controller_client.log_lines import print_lines

    on_log = print_lines if logs else None
    if spec.kind == "local":
        from fray.deploy.local import open_local

        if grace_s is not None and not 0 <= grace_s < float("inf"):
            raise InvalidRequest(f"grace_s={grace_s!r} must be 0 or more seconds")
        return open_local(namespace=namespace, on_log=on_log, env_vars=variables, policy=policy, grace_s=grace_s)
    if variables:
        raise InvalidRequest(
            "env_vars= of open_cluster are for clusters made here; a running one has its own: start its controller "
            "with fray-controller --env KEY=VALUE, or use open_scope(env_vars=...)"
        )
    from fray.deploy.remote import open_remote

    return open_remote(spec.address, namespace=namespace, token=token, on_log=on_log, grace_s=grace_s)


@asynccontextmanager
async def _open_machine(
    spec: Spec, namespace: Namespace | None, logs: bool, env_vars: Mapping[str, str], policy: Policy | None
) -> AsyncIterator[Runtime]:
    with open_node_processes(spec.nodes) as processes:
        # Only now: the nodes import while this process does, which halves the time to the first answer.
        from fray.deploy.machine import open_machine
        from fray.runtime.controller_client.log_lines import print_lines

        async with open_machine(
            processes, spec, namespace=namespace, on_log=print_lines if logs else None, env_vars=env_vars, policy=policy
        ) as runtime:
            yield runtime


def _policy(file: str | None) -> Policy | None:
    if file is None:
        return None
    from fray.controller.policy_file import read_policy_file

    return read_policy_file(file)
