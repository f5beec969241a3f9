"""The client of Iris as Marin imports it. See docs/marin.md."""

from typing import TYPE_CHECKING

from fray.v2.iris.actors import IrisActorGroup, IrisActorHandle
from fray.v2.iris.jobs import IrisJobHandle
from fray.v2.iris_backend import FrayIrisClient
from fray.v2.marin.version import unknown_name

__all__ = [
    "FrayIrisClient",
    "IrisActorGroup",
    "IrisActorHandle",
    "IrisJobHandle",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = unknown_name(__name__, __all__)
