"""Values of secrets that drivers have provided for their jobs: in this process's memory, and nowhere else.

The next life of the controller knows none of them; drivers bring theirs again when they are back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from fray.errors import InvalidRequest
from fray.model.ids import JobId
from fray.model.specs import JobSpec

SECRET_LIMIT_CHARS = 64 * 1024
SECRETS_LIMIT = 100
"""Of one launch."""
SECRET_WAIT_S = 60.0
"""How long an attempt waits for a secret that only its driver knows, and which has not come back yet."""


class SecretStore:
    """By job; of all jobs of one launch alike."""

    def __init__(self) -> None:
        self._values: dict[JobId, Mapping[str, str]] = {}

    def __repr__(self) -> str:
        return f"<SecretStore of {len(self._values)} jobs>"

    def add(self, jobs: Iterable[JobId], values: Mapping[str, str]) -> None:
        """Keep them until `forget`.

        Raises:
            InvalidRequest: too many, or one is too long.
        """
        if len(values) > SECRETS_LIMIT or any(len(value) > SECRET_LIMIT_CHARS for value in values.values()):
            raise InvalidRequest(
                f"at most {SECRETS_LIMIT} secrets of {SECRET_LIMIT_CHARS} characters travel with a launch: "
                "put large ones where the job can read them"
            )
        if values:
            self._values.update(dict.fromkeys(jobs, values))

    def remove(self, job: JobId) -> None:
        self._values.pop(job, None)

    def remove_ended(self, jobs: Iterable[JobId], is_living: Callable[[JobId], bool]) -> None:
        """Of these jobs, keep those of the living."""
        for job in jobs:
            if not is_living(job):
                self.remove(job)

    def values_for(self, spec: JobSpec) -> dict[str, str]:
        """What is known of what the job asks for."""
        known = self._values.get(spec.job_id, {})
        return {name: known[name] for name in sorted(set(spec.secrets.values())) if name in known}

    def missing(self, spec: JobSpec, declared: Collection[str]) -> list[str]:
        """Names the job asks for and neither its author nor its node knows."""
        known = self._values.get(spec.job_id, {})
        return [name for name in sorted(set(spec.secrets.values())) if name not in known and name not in declared]


def check_secrets(specs: Iterable[JobSpec], provided: Collection[str], declared: Collection[str]) -> None:
    """Raises InvalidRequest: nobody knows one of them. ``declared``: what any node knows."""
    for spec in specs:
        for variable, name in spec.secrets.items():
            if name not in provided and name not in declared:
                raise InvalidRequest(
                    f"job {spec.name!r}: nobody knows the secret {name!r} (for its variable {variable}): set {name} in "
                    f"the environment of the driver, or put it into a file {name} where fray-node --secrets looks"
                )
