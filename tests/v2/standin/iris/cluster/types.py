"""Values of job requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class ConstraintOp(Enum):
    EQ = "eq"
    IN = "in"


@dataclass(frozen=True)
class Constraint:
    key: str
    op: ConstraintOp
    value: str | None = None
    values: tuple[str, ...] = ()


def preemptible_constraint(preemptible: bool = True) -> Constraint:
    return Constraint(key="preemptible", op=ConstraintOp.EQ, value=str(preemptible).lower())


def region_constraint(regions: Sequence[str]) -> Constraint:
    return Constraint(key="region", op=ConstraintOp.IN, values=tuple(regions))


def zone_constraint(zone: str) -> Constraint:
    return Constraint(key="zone", op=ConstraintOp.EQ, value=zone)


@dataclass(frozen=True)
class Device:
    kind: str
    variant: str
    count: int


def tpu_device(variant: str, count: int | None = None) -> Device:
    return Device("tpu", variant, count or 0)


def gpu_device(variant: str, count: int = 1) -> Device:
    return Device("gpu", variant, count)


@dataclass(frozen=True)
class ResourceSpec:
    cpu: float = 0
    memory: str | int = 0
    disk: str | int = 0
    device: Device | None = None
    replicas: int = 0


@dataclass(frozen=True)
class EnvironmentSpec:
    pip_packages: Sequence[str] | None = None
    env_vars: Mapping[str, str] | None = None
    extras: Sequence[str] | None = None


@dataclass(frozen=True)
class Entrypoint:
    callable: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    command: tuple[str, ...] = ()

    @classmethod
    def from_callable(cls, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Entrypoint:
        return cls(callable=fn, args=args, kwargs=kwargs)

    @classmethod
    def from_command(cls, *argv: str) -> Entrypoint:
        return cls(command=argv)
