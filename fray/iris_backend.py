"""The client of Iris as Marin imports it. See docs/marin.md."""

from typing import TYPE_CHECKING

from fray.v2.iris.actors import IrisActorGroup, IrisActorHandle, OperationFuture
from fray.v2.iris.convert import (
    NSYS_TASKS_ENV,
    convert_constraints,
    convert_container_profile,
    convert_entrypoint,
    convert_environment,
    convert_resources,
    map_iris_job_state,
    resolve_coscheduling,
    wrap_multiprocess,
    wrap_nsys,
)
from fray.v2.marin.clients import FrayIrisClient, IrisJobHandle
from fray.v2.marin.version import unknown_name

__all__ = [
    "NSYS_TASKS_ENV",
    "FrayIrisClient",
    "IrisActorGroup",
    "IrisActorHandle",
    "IrisJobHandle",
    "OperationFuture",
    "convert_constraints",
    "convert_container_profile",
    "convert_entrypoint",
    "convert_environment",
    "convert_resources",
    "map_iris_job_state",
    "resolve_coscheduling",
    "wrap_multiprocess",
    "wrap_nsys",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = unknown_name(__name__, __all__)
