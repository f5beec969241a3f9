"""What an exit code means, by the rules of the job's author (`JobRequest.exit_codes`).

A rule is about a code that the process chose: that of a program, or of Python code that left by ``sys.exit`` or
``os._exit``. It is not about an exception that left the code (Python ends with 1 then, whatever it was), nor about an
end that Fray has brought about. Rule 128 + n is also about a death by signal n, as shells count.
"""

from __future__ import annotations

from attrs import evolve

from fray.model.exit_rules import ExitRule
from fray.model.specs import EndReason, JobSpec, Outcome

SIGNAL_BASE = 128
"""Shells tell a death by signal n as exit code 128 + n."""


def chosen_code(outcome: Outcome) -> int | None:
    """The exit code that rules are about; None: they say nothing of such an end."""
    if outcome.cause is EndReason.KILLED and outcome.signal is not None:
        return SIGNAL_BASE + outcome.signal
    if outcome.cause is not EndReason.FAILURE or outcome.raised:
        return None
    return outcome.exit_code


def exit_rule(spec: JobSpec, outcome: Outcome) -> ExitRule | None:
    """What the author says of such an end; None: nothing."""
    code = chosen_code(outcome)
    return spec.exit_codes.get(code) if code is not None else None


def apply_exit_rule(spec: JobSpec, outcome: Outcome) -> Outcome:
    """The outcome of an attempt as the author wants it taken: what is to be ignored is a success without a value."""
    if exit_rule(spec, outcome) is not ExitRule.IGNORE:
        return outcome
    how = f"signal {outcome.signal}" if outcome.signal is not None else f"exit code {outcome.exit_code}"
    return evolve(outcome, cause=EndReason.SUCCEEDED, value=None, message=f"{how} counts as success")
