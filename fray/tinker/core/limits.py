"""Limits of each user, and when the client of a job counts as gone."""

from __future__ import annotations

from attrs import field, frozen, validators

_AT_LEAST_ONE = validators.ge(1)


@frozen
class UserLimits:
    """Limits of one user; an answer that refuses something names the limit.

    Attributes:
        body_bytes: of a request; OpenAI's routes have a lower one of their own.
        batch_prompts: prompts of a batch.
        batch_samples: samples of a training step: prompts times ``actor_rollout_ref.rollout.n``.
        queued_requests: requests of all jobs of the user that are not executed yet.
        jobs: jobs that have not ended.
        sessions: sessions of the Tinker API that have not ended.
        models: models of the Tinker API whose sessions have not ended.
        datums: of a request for a forward pass.
        sample_requests: requests for samples that wait, of the Tinker API and of OpenAI's for its models.
        samples: that those requests of the Tinker API ask for together.
    """

    body_bytes: int = field(default=256 << 20, validator=_AT_LEAST_ONE)
    batch_prompts: int = field(default=8_192, validator=_AT_LEAST_ONE)
    batch_samples: int = field(default=65_536, validator=_AT_LEAST_ONE)
    queued_requests: int = field(default=256, validator=_AT_LEAST_ONE)
    jobs: int = field(default=64, validator=_AT_LEAST_ONE)
    sessions: int = field(default=256, validator=_AT_LEAST_ONE)
    models: int = field(default=256, validator=_AT_LEAST_ONE)
    datums: int = field(default=8_192, validator=_AT_LEAST_ONE)
    sample_requests: int = field(default=4_096, validator=_AT_LEAST_ONE)
    samples: int = field(default=65_536, validator=_AT_LEAST_ONE)


DEFAULT_LIMITS = UserLimits()


def limit_text(what: str, name: str, limit: int) -> str:
    """Return the message about something beyond a limit."""
    return f"{what}; the limit {name} of this service is {limit}"


def is_abandoned(now: float, seen_at: float, unfinished: int, grace_s: float) -> bool:
    """Return whether the client of a job is gone.

    Args:
        now: seconds.
        seen_at: time of its last request, or of the last answer to one.
        unfinished: requests that are not executed yet: a client may wait for their answers for long.
        grace_s: seconds without a request; 0: no client is ever gone.
    """
    return bool(grace_s) and not unfinished and now - seen_at >= grace_s
