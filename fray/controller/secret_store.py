"""Values of secrets that drivers have provided for their jobs; only in the memory of this process.

Secrets travel beside a launch and beside a desired attempt, never within a spec, so no row and no event has one. After
a restart the controller knows none of them; drivers provide theirs again when they reconnect, and attempts that need
one wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from fray.errors import InvalidRequest
from fray.model.ids import JobId
from fray.model.specs import JobSpec

SECRET_LIMIT_CHARS = 64 * 1024
SECRETS_LIMIT = 100
"""Most secrets of one launch."""
SECRET_WAIT_S = 60.0
"""Seconds an attempt waits for a secret that only its driver knows, after a restart of the controller."""


class SecretStore:
    """Secrets by job; all jobs of one launch share theirs."""

    def __init__(self) -> None:
        self.by_job: dict[JobId, Mapping[str, str]] = {}
        """Values of each job that has any."""

    def __repr__(self) -> str:
        return f"<SecretStore of {len(self.by_job)} jobs>"

    def add(self, jobs: Iterable[JobId], values: Mapping[str, str]) -> None:
        """Keep the values for these jobs until `remove`.

        Raises:
            InvalidRequest: too many, or one is too long.
        """
        check_limits(values)
        if values:
            # One mapping for all jobs of the launch: 10,000 jobs share one copy.
            self.by_job.update(dict.fromkeys(jobs, values))

    def remove(self, job: JobId) -> None:
        self.by_job.pop(job, None)

    def remove_ended(self, jobs: Iterable[JobId], is_living: Callable[[JobId], bool]) -> None:
        """Remove the secrets of those of these jobs that have ended."""
        # A job that retries still needs them: attempts of the next generation are sent them again.
        for job in jobs:
            if not is_living(job):
                self.remove(job)

    def values_for(self, spec: JobSpec) -> dict[str, str]:
        """Return the known values of the secrets that the job asks for."""
        known = self.by_job.get(spec.job_id, {})
        # Only what this job names, although others of its launch may have more.
        return {name: known[name] for name in sorted(set(spec.secrets.values())) if name in known}

    def missing(self, spec: JobSpec, declared: Collection[str]) -> list[str]:
        """Return the names the job asks for that neither its driver nor its node (``declared``) knows. A node's own
        values take precedence: the operator of a machine knows better."""
        known = self.by_job.get(spec.job_id, {})
        return [name for name in sorted(set(spec.secrets.values())) if name not in known and name not in declared]


def check_limits(values: Mapping[str, str]) -> None:
    """Check the number and the lengths of the values.

    Raises:
        InvalidRequest: too many, or one is too long.
    """
    if len(values) > SECRETS_LIMIT or any(len(value) > SECRET_LIMIT_CHARS for value in values.values()):
        raise InvalidRequest(
            f"at most {SECRETS_LIMIT} secrets of {SECRET_LIMIT_CHARS} characters travel with a launch: "
            "put large ones where the job can read them"
        )


def check_secrets(specs: Iterable[JobSpec], provided: Collection[str], declared: Collection[str]) -> None:
    """Check that each secret is provided by the driver or ``declared`` by a node.

    Raises:
        InvalidRequest: one of them is unknown.
    """
    for spec in specs:
        for variable, name in spec.secrets.items():
            # Refused at the launch: later it would be an attempt that waits for a minute and then fails.
            if name not in provided and name not in declared:
                raise InvalidRequest(
                    f"job {spec.name!r}: secret {name!r} (for variable {variable}) is unknown: set {name} in the "
                    f"environment of the driver, or put it into a file {name} in the directory of fray-node --secrets"
                )
