"""Decision about calls whose host is lost: repeated, failed as undelivered, or of unknown outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from attrs import frozen

from fray.errors import ActorDied, FrayError, MachineLost, OutcomeUnknown
from fray.model.specs import EndReason, Outcome
from fray.net.codec import Bytes
from fray.runtime.serialization import errors


class LossAction(Enum):
    """Action for a call whose incarnation is gone."""

    REPEAT = "goes to the next incarnation"
    DIED = "ends as ActorDied: it was surely not delivered"
    UNKNOWN = "ends as OutcomeUnknown: it may have taken effect"


def on_host_lost(*, delivered: bool, may_come_back: bool, repeats: int) -> LossAction:
    """Decide about one call.

    Args:
        delivered: it may have arrived.
        may_come_back: there may be a next incarnation.
        repeats: how often the caller allows it to be delivered again.
    """
    # Surely without effect: repeating is always safe, whatever the caller allows.
    if not delivered:
        return LossAction.REPEAT if may_come_back else LossAction.DIED
    # Exactly-once cannot be had across a crash of the callee: without permission to repeat, the outcome is unknown.
    return LossAction.REPEAT if may_come_back and repeats > 0 else LossAction.UNKNOWN


@frozen
class HostLoss:
    """Reason for which an incarnation is gone, from which the error of each of its calls is made."""

    text: str
    """Sentence without its full stop, such as ``its process was killed by signal 9``."""
    is_machine_lost: bool = False
    """The machine is silent: it is not known whether the process lives."""
    cause: BaseException | None = None
    channel_error: FrayError | None = None
    """Set when no process died: the two sides cannot talk for this reason."""
    raised: Callable[[], BaseException] | None = None
    """Set when the constructor raised: makes its error, one for each call, so that their tracebacks stay apart."""

    def undelivered(self, label: str) -> BaseException:
        """Return the error of a call that surely had no effect."""
        # Its own type, not ActorDied: code that guards against this error guards against its type, and it says what to
        # fix.
        if self.raised is not None:
            error = self.raised()
            error.add_note(f"raised by the constructor of actor {label}, which will never answer")
            return error
        # No process died, so the error says what kept the two sides apart.
        return self.channel_error or self.died(label)

    def died(self, label: str) -> ActorDied:
        """Return the loss itself as an error."""
        error = (MachineLost if self.is_machine_lost else ActorDied)(f"actor {label} is gone: {self.text}", actor=label)
        error.__cause__ = self.cause
        return error

    def delivered(self, label: str, method: str, repeated: bool = False) -> ActorDied:
        """Return the error of a call that may have taken effect. ``repeated``: its caller allows that already."""
        advice = (
            "it may be repeated, but there is no next incarnation of the actor to repeat it"
            if repeated
            else "pass idempotent=True if it may be repeated"
        )
        text = (
            f"actor {label} was lost while {method}() was under way: {self.text}. "
            f"The call may or may not have taken effect; {advice}"
        )
        # Of a silent machine even the death is not known; MachineLost says so, and the actor may come back.
        error = (MachineLost if self.is_machine_lost else OutcomeUnknown)(text, actor=label, method=method)
        error.__cause__ = self.cause or self.channel_error or self.died(label)
        return error


def loss_of_outcome(outcome: Outcome, blobs: Sequence[Bytes]) -> HostLoss:
    """Return the loss of an actor that the directory reports as ended; ``blobs`` holds its error, if it had one."""
    text = outcome.message or f"it ended ({outcome.cause})"
    # Other ends (preemption, out of memory, deletion) may carry an earlier error, which would mislead.
    if not blobs or outcome.cause is not EndReason.FAILURE:
        return HostLoss(text=text, is_machine_lost=outcome.cause is EndReason.MACHINE_LOST)
    text = f"its constructor raised {text}" if outcome.constructing else text
    return loss_of_error(bytes(blobs[0]), text, outcome.constructing)


def loss_of_error(error: bytes, text: str, constructing: bool) -> HostLoss:
    """Return the loss of an actor that failed with ``error`` (packed by `dump_error`)."""
    load = partial(errors.load_error, error)
    return HostLoss(text=text, cause=load(), raised=load if constructing else None)
