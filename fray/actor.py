"""Actors as Marin imports them. See docs/marin.md."""

from typing import TYPE_CHECKING

from fray.errors import ActorUnavailableError
from fray.v2.actor import (
    ActorContext,
    ActorFuture,
    ActorGroup,
    ActorHandle,
    ActorMethod,
    HostedActor,
    _reset_current_actor,
    _set_current_actor,
    current_actor,
)
from fray.v2.interface import _current_actor_var as _current_actor_ctx
from fray.v2.marin.version import unknown_name

__all__ = [
    "ActorContext",
    "ActorFuture",
    "ActorGroup",
    "ActorHandle",
    "ActorMethod",
    "ActorUnavailableError",
    "HostedActor",
    "_current_actor_ctx",
    "_reset_current_actor",
    "_set_current_actor",
    "current_actor",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = unknown_name(__name__, __all__)
