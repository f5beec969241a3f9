"""Errors of user code on their way through Ray: packed where they rose, unpacked for whoever asks, never in between."""

from __future__ import annotations

import traceback
from typing import Any

from ray import cloudpickle as ray_cloudpickle
from ray import exceptions

from fray.errors import RemoteTraceback

cloudpickle: Any = ray_cloudpickle


class PickledError(Exception):
    """An error, packed: as itself if it can be pickled, and as text in any case."""

    def __init__(self, packed: bytes | None, text: str, trace: str = "") -> None:
        super().__init__(packed, text, trace)
        self.packed, self.text, self.trace = packed, text, trace

    def __str__(self) -> str:
        return self.text

    def unpacked(self) -> BaseException:
        """The error itself, its remote traceback as its cause; a RuntimeError where it cannot be had."""
        error: BaseException | None = None
        if self.packed is not None:
            try:
                inside = cloudpickle.loads(self.packed)
                error = inside if isinstance(inside, BaseException) else _rebuilt(*inside)
            except Exception:  # noqa: BLE001 (whatever its class does: its text is left)
                error = None
        error = error or RuntimeError(self.text)
        if self.trace:
            error.__cause__ = RemoteTraceback(self.trace)
        return error


class RetryableError(PickledError):
    """A failure after which the job begins again: the only one that Ray is told to retry."""


def packed(error: BaseException, kind: type[PickledError] = PickledError) -> PickledError:
    """Pack it, for `Carried.unpacked`; its traceback becomes text."""
    trace = "".join(traceback.format_exception(error))
    return kind(_as_itself(error) or _in_parts(error), f"{type(error).__name__}: {error}", trace)


def _as_itself(error: BaseException) -> bytes | None:
    """By its own pickling, if what arrives is the same: a class may make another text of its ``args`` each time."""
    try:
        inside: bytes = cloudpickle.dumps(error)
        arrives = cloudpickle.loads(inside)
        same = type(arrives) is type(error) and str(arrives) == str(error)
    except Exception:  # noqa: BLE001 (locks, sockets, classes that refuse)
        return None
    return inside if same else None


def _in_parts(error: BaseException) -> bytes | None:
    """By its class, arguments and attributes, without its ``__init__``, whose arguments are others."""
    parts = (type(error), error.args, dict(error.__dict__))
    try:
        inside: bytes = cloudpickle.dumps(parts)
        _rebuilt(*cloudpickle.loads(inside))
    except Exception:  # noqa: BLE001 (as text, then)
        return None
    return inside


def _rebuilt(cls: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def carried(error: BaseException) -> PickledError:
    """What Ray raised for a task or a call, as something that travels on."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, PickledError):
        return cause
    if isinstance(error, PickledError):
        return error
    if isinstance(error, exceptions.RayTaskError) and isinstance(cause, BaseException):
        return packed(cause)
    return PickledError(None, _first_line(error))


def own_error(error: BaseException, who: str) -> BaseException:
    """What a caller shall see for what Ray raised: the error of user code, or RuntimeError for a death."""
    if isinstance(error, exceptions.RayActorError):
        return RuntimeError(f"{who} is dead: {_first_line(error)}")
    return carried(error).unpacked()


def of_user_code(error: BaseException) -> bool:
    """Whether user code raised it, and not the loss of a process or a machine."""
    return isinstance(error, exceptions.RayTaskError)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no more is known'}"
