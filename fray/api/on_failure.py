"""Decision of a scope's owner about a child that has failed for good: ``on_failure=``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from fray.errors import InvalidRequest
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.scope.children import OnChildFailure

FailureDecision = Literal["escalate", "absorb"]
FailureHook: TypeAlias = Callable[[Any, BaseException], FailureDecision]
"""Called with the `Job` or `ActorHandle` that has failed and its error, in the scope's task; it must not wait."""
OnFailure: TypeAlias = FailureDecision | FailureHook


def failure_policy(
    on_failure: OnFailure, make_handle: Callable[[JobRecord], object]
) -> OnChildFailure | Callable[[JobRecord, BaseException], OnChildFailure]:
    """Return the decision, or the function that makes it. ``make_handle`` makes the first argument of a hook.

    Raises:
        InvalidRequest: ``on_failure`` is neither "escalate", "absorb" nor callable.
    """
    if isinstance(on_failure, str) and on_failure in get_args(FailureDecision):
        return OnChildFailure(on_failure)
    if not callable(on_failure):
        raise InvalidRequest(f'on_failure={on_failure!r} must be "escalate", "absorb" or a function(child, error)')

    def decide(record: JobRecord, error: BaseException) -> OnChildFailure:
        handle = make_handle(record)
        decision = on_failure(handle, error)
        if decision not in get_args(FailureDecision):
            raise InvalidRequest(
                f'the on_failure hook returned {decision!r} for {handle!r}: return "escalate" or "absorb" (a plain '
                "function, not an async one)"
            ) from error
        return OnChildFailure(decision)

    return decide
