"""Every error Fray raises: one base, whose doing it was, and what to do about it.

All are picklable and keep ``__cause__`` and notes when they cross a process (`to_wire` / `from_wire` carry
the ones that travel as control messages; errors of user code travel as pickles, see
`fray.runtime.serialization.pickling`).
"""

from __future__ import annotations

from typing import Any


class FrayError(Exception):
    """Base of everything Fray raises on purpose.

    The message says what happened, whose doing it was, and what to do next. ``details`` holds the same
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


# What the user asked for is wrong ------------------------------------------------------------------------------------


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
    """The cluster knows no job of this id."""


class NoSuchReservation(FrayError, LookupError):
    """The cluster knows no reservation of this id, or it has ended; the message says which, and why."""


class NoSuchActor(FrayError, LookupError):
    """No actor of this name or id lives, and none is on its way."""


# The way to the cluster ----------------------------------------------------------------------------------------------


class ConnectionFailed(FrayError, ConnectionError):
    """Base: a peer cannot be reached or will not talk to us."""


class Unreachable(ConnectionFailed):
    """Nobody answers at the address (within the time allowed)."""


class Refused(ConnectionFailed):
    """The address is there and nobody listens: the process that did is gone."""


class Unauthorized(ConnectionFailed):
    """Wrong or missing token."""


class ProtocolMismatch(ConnectionFailed):
    """The peer speaks another major version of Fray's protocol, or no Fray at all."""


class ChannelClosed(ConnectionFailed, RuntimeError):
    """The conversation has ended; ``details['reason']`` says why."""


class SessionEnded(ChannelClosed):
    """The controller has ended this driver's session, mostly because the driver was away for longer than its grace;
    what the session owned has ended with it. Open the cluster again.

    ``details``: ``session``, ``reason``, ``ended_at`` (seconds since the epoch by the controller's clock, or None)
    and ``survivors`` (ids of the detached jobs that it has launched and that live on).
    """


class ChannelFull(FrayError):
    """The peer does not take what is sent to it fast enough and the bounded outbox is full."""


# The other side failed -----------------------------------------------------------------------------------------------


class RemoteTraceback(Exception):
    """Cause attached to an error of user code: the traceback as text, from where it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


class JobFailed(FrayError):
    """A job ended without success for a reason that is no Python exception of its own (killed, exit code,
    lost machine, environment), or `Cluster.wait(raise_on_failure=True)` met a failure.

    ``details``: ``job_id``, ``name``, ``cause``, ``exit_code``, ``signal``, ``nodes`` of its last attempt, how many
    ``attempts`` it had, and ``ended_by``, who asked for its end.
    """


class JobStopped(JobFailed):
    """The job was terminated on request, or ended with its owner."""


class ActorDied(FrayError, RuntimeError):
    """The process (or the object) behind a handle is gone; the call did not take effect, or its effect died with it."""


class ActorFailed(FrayError, RuntimeError):
    """The actor itself said that it has failed: ``current_actor().fail(message)``."""


class LinkedActorDied(FrayError, RuntimeError):
    """The actor failed because one that it was linked to has gone for good; the cause says how that one ended."""


class GroupFailed(FrayError, RuntimeError):
    """So many members of an `ActorGroup` have ended for good that what was waited for can never be."""


class MachineLost(ActorDied):
    """The machine under the callee has been silent too long."""


class CallCancelled(FrayError):
    """The call was cancelled by its caller. Whoever else awaits it gets this; so does a method that is blocked in its
    stream."""


class CallCycle(FrayError, RuntimeError):
    """The call can never begin: the actor waits for it. ``details['cycle']`` has the calls, outermost first.

    Give the actor more room (``max_concurrency``, a concurrency group, async methods), or do not wait for an answer
    that needs yourself.
    """


class CancelIgnored(FrayError, RuntimeError):
    """A method on a thread was cancelled and went on for `ActorConfig.kill_after_s`: its actor ends as failed."""


class DeadlineExceeded(FrayError, TimeoutError):
    """The deadline given with the call (or inherited from the caller's) has passed."""


class ObjectLost(FrayError, RuntimeError):
    """An object that was put is gone: the job or driver that owned it has ended, or nobody held it any more."""


class FutureExpired(FrayError):
    """A future that came from another process was settled so long ago that its author does not keep it any more."""


class OutcomeUnknown(ActorDied):
    """The callee died or forgot while the call was under way: it may or may not have taken effect.

    Say ``idempotent=True`` on the call if it may be repeated.
    """


class NoSuchMethod(FrayError, AttributeError):
    """The actor has no public method of this name; the message names the near ones."""


class RemoteError(FrayError):
    """An error of user code whose own class could not be rebuilt here; the text is complete."""


# The house itself ----------------------------------------------------------------------------------------------------


class BlockingNotAllowed(FrayError, RuntimeError):
    """This process or thread cannot use the cluster: it was forked from the one that can, or it is the loop's own,
    where nobody may wait. The message says what to do instead."""


class ScopeCancelled(FrayError, RuntimeError):
    """What sync code waited for was given up because its scope is ending: leaving the ``with`` says why."""


class StoreError(FrayError):
    """The controller's store cannot be used: damaged, of a later version, or held by another controller."""


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
    """A control-message form: class name, message, details. Inverse of `from_wire`."""
    return {"error": type(error).__name__, "message": str(error), "details": error.details}


def from_wire(data: dict[str, Any]) -> FrayError:
    """The error again; a class this version does not know comes back as plain `FrayError`."""
    return _BY_NAME.get(data["error"], FrayError)(data["message"], **data.get("details", {}))
