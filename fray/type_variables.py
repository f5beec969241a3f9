"""Type variables with defaults: a handle, job or future that is annotated without brackets has results of type Any.

Defaults of type variables are read by type checkers only: Python has them from 3.13 on, and Fray runs on 3.11. Below
``TYPE_CHECKING`` they come from ``typing_extensions``, which each checker brings along and no process of Fray imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar

    A = TypeVar("A", default=Any)
    A_co = TypeVar("A_co", covariant=True, default=Any)
    T_co = TypeVar("T_co", covariant=True, default=Any)
    I_co = TypeVar("I_co", covariant=True, default=Any)
    P = ParamSpec("P", default=...)
else:
    from typing import ParamSpec, TypeVar

    A_co, T_co, I_co = (TypeVar(name, covariant=True) for name in ("A_co", "T_co", "I_co"))
    A, P = TypeVar("A"), ParamSpec("P")

# A, A_co: class of an actor. T_co: what a job, call or task returns. I_co: item of a stream. P: parameters of a method.
__all__ = ["A", "A_co", "I_co", "P", "T_co"]
