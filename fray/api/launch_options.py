"""Options of launches as typed dictionaries: what type checkers know of ``create_actor(Counter, 10, name="counter")``.

A function that takes the arguments of another (``*args: P.args, **kwargs: P.kwargs``) cannot have options of its own in
the type system (PEP 612). So each such function has overloads: no options and every argument checked; options, and
arguments by position checked; options, and arguments by name not checked.
"""

from __future__ import annotations

from typing import TypedDict

from fray.api.jobs.job_spec import Lifetime, ReservationRef
from fray.api.on_failure import OnFailure
from fray.model.environment import EnvironmentConfig
from fray.model.resources import ResourceConfig
from fray.model.specs import ActorConfig


class RunOptions(TypedDict, total=False):
    """Options of `Scope.run`."""

    resources: ResourceConfig | None
    name: str | None


class GroupOptions(TypedDict, total=False):
    """Options of `Scope.create_actor_group`, without ``count``."""

    name: str | None
    resources: ResourceConfig | None
    environment: EnvironmentConfig | None
    actor_config: ActorConfig | None
    on_failure: OnFailure
    light: bool
    reservation_id: ReservationRef | None


class ActorOptions(TypedDict, total=False):
    """Options of `Scope.create_actor`."""

    name: str | None
    resources: ResourceConfig | None
    environment: EnvironmentConfig | None
    max_restarts: int | None
    actor_config: ActorConfig | None
    on_failure: OnFailure
    get_if_exists: bool
    lifetime: Lifetime
    reservation_id: ReservationRef | None
