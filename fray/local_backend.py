"""The client of this process's threads as Marin imports it. See docs/marin.md."""

from typing import TYPE_CHECKING

from fray.v2.local_backend import LocalActorHandle, LocalActorMethod
from fray.v2.marin.clients import LocalActorGroup, LocalClient, LocalJobHandle
from fray.v2.marin.version import unknown_name

__all__ = [
    "LocalActorGroup",
    "LocalActorHandle",
    "LocalActorMethod",
    "LocalClient",
    "LocalJobHandle",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = unknown_name(__name__, __all__)
