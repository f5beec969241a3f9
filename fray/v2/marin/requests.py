"""Requests and environments as Marin has them today."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fray.v2 import types as april
from fray.v2.marin.resources import ResourceConfig
from fray.v2.marin.version import SameInstances, marin_function, marin_parameters


class SecretBehavior(StrEnum):
    """Credentials of a job: the submitter's, too (INHERIT), or only those of its ``secrets`` (ISOLATE)."""

    INHERIT = "inherit"
    ISOLATE = "isolate"


@marin_parameters(
    "workspace docker_image pip_packages env_vars secrets secret_behavior extras setup_scripts sync_packages"
)
@dataclass(frozen=True)
class EnvironmentConfig(april.EnvironmentConfig, metaclass=SameInstances):
    """Environment of a job's process.

    Attributes:
        secrets: values of credentials by name; not part of the text of this object.
        secret_behavior: INHERIT (the default) adds ``HF_TOKEN`` and ``WANDB_API_KEY`` of the submitter.
        setup_scripts: scripts that run before the command, in place of Iris's own. Iris only.
        sync_packages: members of the workspace that are installed. Default: all. Iris only.
    """

    _same_as = april.EnvironmentConfig

    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_behavior: str = SecretBehavior.INHERIT
    setup_scripts: Sequence[str] | None = None
    sync_packages: Sequence[str] = ()


@marin_function
def create_environment(
    workspace: str | None = None,
    docker_image: str | None = None,
    pip_packages: Sequence[str] | None = None,
    env_vars: Mapping[str, str | None] | None = None,
    extras: Sequence[str] | None = None,
    setup_scripts: Sequence[str] | None = None,
    sync_packages: Sequence[str] | None = None,
    secrets: Mapping[str, str] | None = None,
    secret_behavior: str = SecretBehavior.INHERIT,
) -> EnvironmentConfig:
    """Return an environment with the usual variables; the workspace defaults to the working directory.

    HF_DATASETS_TRUST_REMOTE_CODE is 1 and TOKENIZERS_PARALLELISM is false; ``env_vars`` overrides them, and a variable
    whose value is None is not set. HF_TOKEN and WANDB_API_KEY are secrets, which the client adds when it submits.
    """
    if workspace is None and docker_image is None:
        workspace = os.getcwd()
    variables: dict[str, str | None] = {
        "HF_DATASETS_TRUST_REMOTE_CODE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MARIN_CI_DISABLE_RUNTIME_ENVS": os.environ.get("MARIN_CI_DISABLE_RUNTIME_ENVS"),
    }
    variables |= dict(env_vars or {})
    return EnvironmentConfig(
        workspace=workspace,
        docker_image=docker_image,
        pip_packages=list(pip_packages or ()),
        env_vars={name: value for name, value in variables.items() if value is not None},
        extras=list(extras or ()),
        secrets=dict(secrets or {}),
        secret_behavior=secret_behavior,
        setup_scripts=setup_scripts,
        sync_packages=list(sync_packages or ()),
    )


@marin_parameters("max_concurrency max_restarts max_task_retries priority")
@dataclass(frozen=True)
class ActorConfig(april.ActorConfig, metaclass=SameInstances):
    """Options of an actor: those of `fray.v2.ActorConfig`."""

    _same_as = april.ActorConfig


@marin_parameters(
    "name entrypoint resources environment replicas processes_per_task max_retries_failure max_retries_preemption"
    " max_task_failures priority timeout"
)
@dataclass(unsafe_hash=True)
class JobRequest(april.JobRequest, metaclass=SameInstances):
    """Job to submit.

    Attributes:
        timeout: longest time from the start to the end: seconds, or an object with ``to_seconds()``. Default: none.
        processes_per_task: processes that share the GPUs of each machine. Iris only.
    """

    _same_as = april.JobRequest

    resources: april.ResourceConfig = field(default_factory=ResourceConfig)
    timeout: Any = None

    def _check_processes(self) -> None:
        if self.processes_per_task < 1:
            raise ValueError(f"job {self.name!r}: processes_per_task={self.processes_per_task} must be 1 or more")
