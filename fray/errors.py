"""Every error Fray raises: one base class, grouped by the side that failed.

The message of each says what happened, which side caused it, and what to do about it. All errors are picklable and keep
``__cause__`` and notes when they cross a process: `to_wire` and `from_wire` carry those that travel as control
messages; errors of user code travel as pickles (see `fray.runtime.serialization.pickling`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any, TypeGuard


class FrayError(Exception):
    """Base of everything Fray raises on purpose.

    The message says what happened, which side caused it, and what to do next. ``details`` holds the same
    as plain JSON values for programs.
    """

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = details

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.args, self.details, self.__dict__))

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def _rebuild(cls: type[FrayError], args: tuple[Any, ...], details: dict[str, Any], state: dict[str, Any]) -> FrayError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.details = details
    error.__dict__.update(state)
    return error


# Invalid requests ----------------------------------------------------------------------------------------------------


class InvalidRequest(FrayError, ValueError):
    """The request itself is wrong; nothing was done. The message says what to write instead."""


class UnknownClusterSpec(InvalidRequest):
    """``FRAY_CLUSTER_SPEC`` or the argument of `open_cluster` names no kind of cluster."""


class NotPicklable(FrayError, TypeError):
    """A callable, argument or result cannot travel; the message names the attribute that cannot."""


class MessageTooLarge(FrayError, ValueError):
    """One message is over the limit; ``details`` has ``size_bytes`` and ``limit_bytes``."""


class NeverSchedulable(InvalidRequest):
    """No declared machine could ever hold the job, even if the whole cluster were empty."""


class NameInUse(FrayError):
    """A living job or actor of this namespace already has the name."""


class NoSuchJob(FrayError, LookupError):
    """There is no job of this id."""


class NoSuchReservation(FrayError, LookupError):
    """There is no reservation of this id, or it has ended; the message says which, and why."""


class NoSuchActor(FrayError, LookupError):
    """No actor of this name or id lives, and none is on its way."""


# Connections ---------------------------------------------------------------------------------------------------------


class ConnectionFailed(FrayError, ConnectionError):
    """Base: a peer cannot be reached or rejects the connection."""


class Unreachable(ConnectionFailed):
    """No answer from the address within the time allowed."""


class Refused(ConnectionFailed):
    """Connection refused: nothing is listening on the address; the process that did has ended."""


class Unauthorized(ConnectionFailed):
    """Wrong or missing token."""


class ProtocolMismatch(ConnectionFailed):
    """The peer speaks another major version of Fray's protocol, or a different protocol."""


class Unsupported(ProtocolMismatch):
    """The other side runs an older release of Fray, which does not know this request or a value in it; only this
    request has failed. ``details``: the releases that it ``needs`` and that ``runs`` there, or ``capability``.
    """


class ChannelClosed(ConnectionFailed, RuntimeError):
    """The channel has closed; ``details['reason']`` says why."""


class SessionEnded(ChannelClosed):
    """The controller has ended this driver's session, mostly because the driver was disconnected for longer than its
    grace period; everything the session owned has ended with it. Open the cluster again.

    ``details``: ``session``, ``reason``, ``ended_at`` (seconds since the epoch by the controller's clock, or None)
    and ``survivors`` (ids of detached jobs that the session launched and that are still running).
    """


class ChannelFull(FrayError):
    """The bounded send buffer is full: the peer does not receive fast enough."""


# The other side failed -----------------------------------------------------------------------------------------------


class RemoteTraceback(Exception):
    """Cause attached to an error of user code: in one line which way the error took and where it was raised.

    Attributes:
        text: the traceback as text, from where it was raised. Printed below the line only if the frames are not in the
            error's own traceback: as a note, which Python indents, and no other text, in a member of a group.
        where: file, line number, function and text of the line.
        path: this program or job, then the job that it waited for and so on, down to the one that raised the error.
    """

    def __init__(self, text: str, where: str = "", path: tuple[str, ...] = ()) -> None:
        super().__init__(text, where, path)
        self.text, self.where, self.path = text, where, path
        if not where:
            self.add_note(text)

    def __str__(self) -> str:
        way = " › ".join(self.path)
        return f"{way}{': ' if way else ''}{self.where or 'traceback of the process in which it was raised:'}"


SCOPE_MESSAGE = "in scope "
"""Beginning of the message of the group that a scope raises."""


def is_scope_error(error: BaseException) -> TypeGuard[BaseExceptionGroup[BaseException]]:
    """Return whether a scope has raised it: by its message, all that `except*` and `split` keep of a group."""
    return isinstance(error, BaseExceptionGroup) and error.message.startswith(SCOPE_MESSAGE)


def failures_in(error: BaseException) -> Iterator[BaseException]:
    """Yield the members of the error of a scope, and of the errors of scopes in it; of any other error, itself."""
    if is_scope_error(error):
        for member in error.exceptions:
            yield from failures_in(member)
    else:
        yield error


class JobFailed(FrayError):
    """A job ended without success for a reason other than a Python exception of its own (killed, exit code, lost
    machine, environment), or `Cluster.wait(raise_on_failure=True)` met a failure.

    ``details``: ``job_id``, ``name``, ``cause``, ``exit_code``, ``signal``, ``nodes`` of its last attempt, the number
    of ``attempts``, and ``ended_by``: the user or job that requested the end.
    """


class JobStopped(JobFailed):
    """The job was terminated on request, or ended with its owner."""


class ActorUnavailableError(RuntimeError):
    """The actor does not answer: it has ended, or its process or machine is gone. For callers of `fray.v2`."""


class ActorDied(FrayError, ActorUnavailableError):
    """The process (or the object) behind a handle is gone; the call did not take effect, or its effect died with it."""


class ActorFailed(FrayError, RuntimeError):
    """The actor reported its own failure with ``current_actor().fail(message)``."""


class LinkedActorDied(FrayError, RuntimeError):
    """The actor failed because an actor linked to it has ended for good; the cause says how that actor ended."""


class GroupFailed(FrayError, RuntimeError):
    """Too many members of an `ActorGroup` have ended for good for the awaited condition to become true."""


class MachineLost(ActorDied):
    """The machine under the callee has been silent too long."""


class CallCancelled(FrayError, CancelledError):
    """The call was cancelled by its caller. Every other waiter for its result gets this error, and so does a method
    that is blocked in a stream of the call."""


class CallCycle(FrayError, RuntimeError):
    """The call can never begin, because the actor is waiting for its result. ``details['cycle']`` lists the calls,
    outermost first.

    Raise the actor's concurrency (``max_concurrency``, a concurrency group, async methods), or do not wait for a result
    that depends on the waiting call.
    """


class CancelIgnored(FrayError, RuntimeError):
    """A method on a thread kept running for `ActorConfig.kill_after_s` after it was cancelled; its actor ends as
    failed."""


class DeadlineExceeded(FrayError, TimeoutError):
    """The deadline given with the call (or inherited from the caller's) has passed."""


class ObjectLost(FrayError, RuntimeError):
    """A stored object no longer exists: the job or driver that owned it has ended, or all references were released."""


class FutureExpired(FrayError):
    """The result of a future from another process has expired: its author keeps results for a limited time only."""


class OutcomeUnknown(ActorDied):
    """The callee died or lost its state while the call was running: it may or may not have taken effect.

    Pass ``idempotent=True`` with the call if it may be repeated.
    """


class NoSuchMethod(FrayError, AttributeError):
    """The actor has no public method of this name; the message names similar ones."""


class RemoteError(FrayError):
    """An error of user code whose own class could not be rebuilt here; the text is complete."""


# Fray itself ---------------------------------------------------------------------------------------------------------


class BlockingNotAllowed(FrayError, RuntimeError):
    """The cluster cannot be used from this process or thread: a fork of the process that can, or the thread of the
    event loop, where blocking is not allowed. The message says what to do instead."""


class ScopeCancelled(FrayError, RuntimeError):
    """A blocking wait was given up because its scope is ending; leaving the ``with`` block raises the reason."""


class StoreError(FrayError):
    """The controller's store cannot be used: damaged, of a later version, or held by another controller."""


class InternalError(FrayError, RuntimeError):
    """The controller could not handle a request because of a defect of its own; nothing was changed. Its log has the
    traceback."""


class NodeNameInUse(FrayError):
    """Another living ``fray-node`` already serves under this name."""


class LaunchFailed(FrayError):
    """A node could not start a process for an attempt."""


_BY_NAME: dict[str, type[FrayError]] = {}


def _collect(cls: type[FrayError]) -> None:
    _BY_NAME[cls.__name__] = cls
    for sub in cls.__subclasses__():
        _collect(sub)


_collect(FrayError)


def to_wire(error: FrayError) -> dict[str, Any]:
    """Return the error as a field of control messages: class name, message, details. Inverse of `from_wire`."""
    return {"error": type(error).__name__, "message": str(error), "details": error.details}


def from_wire(data: dict[str, Any]) -> FrayError:
    """Return the error of such a field; an unknown class becomes a plain `FrayError`."""
    return _BY_NAME.get(data["error"], FrayError)(data["message"], **data.get("details", {}))
