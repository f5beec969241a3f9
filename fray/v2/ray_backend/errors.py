"""Errors of user code, pickled where they are raised and unpickled in the process of the caller, never in between."""

from __future__ import annotations

import traceback
from typing import Any

from ray import cloudpickle as ray_cloudpickle
from ray import exceptions

from fray.errors import ActorUnavailableError, RemoteTraceback

cloudpickle: Any = ray_cloudpickle


class PickledError(Exception):
    """Pickled error, and its text, which is used if the error cannot be pickled."""

    def __init__(self, packed: bytes | None, text: str, trace: str = "") -> None:
        super().__init__(packed, text, trace)
        self.packed, self.text, self.trace = packed, text, trace

    def __str__(self) -> str:
        return self.text

    def unpacked(self) -> BaseException:
        """Return the error itself, with its remote traceback as cause; a RuntimeError if it cannot be unpickled."""
        error: BaseException | None = None
        if self.packed is not None:
            try:
                inside = cloudpickle.loads(self.packed)
                error = inside if isinstance(inside, BaseException) else _rebuilt(*inside)
            except Exception:  # noqa: BLE001 (its class may do anything; the text remains)
                error = None
        error = error or RuntimeError(self.text)
        if self.trace:
            error.__cause__ = RemoteTraceback(self.trace)
        return error


class RetryableError(PickledError):
    """Failure after which the job restarts: the only error that Ray retries."""


def packed(error: BaseException, kind: type[PickledError] = PickledError) -> PickledError:
    """Pickle an error, for `PickledError.unpacked`; the traceback becomes text."""
    trace = "".join(traceback.format_exception(error))
    return kind(_pickled_whole(error) or _pickled_in_parts(error), f"{type(error).__name__}: {error}", trace)


def _pickled_whole(error: BaseException) -> bytes | None:
    """Return the error pickled its own way; None if it does not arrive the same, as some classes change their text."""
    try:
        inside: bytes = cloudpickle.dumps(error)
        arrives = cloudpickle.loads(inside)
        same = type(arrives) is type(error) and str(arrives) == str(error)
    except Exception:  # noqa: BLE001 (locks, sockets, classes that refuse)
        return None
    return inside if same else None


def _pickled_in_parts(error: BaseException) -> bytes | None:
    """Return the error pickled as class, arguments and attributes, for classes whose ``__init__`` takes others."""
    parts = (type(error), error.args, dict(error.__dict__))
    try:
        inside: bytes = cloudpickle.dumps(parts)
        _rebuilt(*cloudpickle.loads(inside))
    except Exception:  # noqa: BLE001 (the text remains)
        return None
    return inside


def _rebuilt(cls: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def carried(error: BaseException) -> PickledError:
    """Return an error that Ray raised for a task or a call in a form that can be sent on."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, PickledError):
        return cause
    if isinstance(error, PickledError):
        return error
    if isinstance(error, exceptions.RayTaskError) and isinstance(cause, BaseException):
        return packed(cause)
    return PickledError(None, _first_line(error))


def own_error(error: BaseException, who: str) -> BaseException:
    """Return what a caller shall see of an error that Ray raised: the error of user code, or RuntimeError for a
    death."""
    if isinstance(error, exceptions.RayActorError):
        return ActorUnavailableError(f"{who} is dead: {_first_line(error)}")
    return carried(error).unpacked()


def is_user_error(error: BaseException) -> bool:
    """Return whether user code raised the error, as opposed to the loss of a process or a machine."""
    return isinstance(error, exceptions.RayTaskError)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no details'}"
