"""Payloads and values in the tables: which blobs some row still needs."""

from __future__ import annotations

from fray.model.ids import BlobId, JobId
from fray.model.specs import Outcome
from fray.scheduler.state.attempts import AttemptTables
from fray.scheduler.state.rows import AttemptRow, JobRow


class ValueTables(AttemptTables):
    """What `Tables` knows of blobs."""

    def _make_indexes(self) -> None:
        super()._make_indexes()
        self.value_sizes: dict[JobId, int] = {}
        """Ended jobs that have a value, and its size; oldest end first."""
        self.values_bytes = 0
        self.blob_refs: dict[BlobId, int] = {}
        """How many rows refer to a payload or value."""

    def is_blob_used(self, blob: BlobId) -> bool:
        """Some row still needs this payload or value."""
        return blob in self.blob_refs

    def retain_blob(self, blob: BlobId | None) -> None:
        if blob is not None:
            self.blob_refs[blob] = self.blob_refs.get(blob, 0) + 1

    def release_blob(self, blob: BlobId | None) -> None:
        if blob is not None:
            self.blob_refs[blob] -= 1
            if not self.blob_refs[blob]:
                del self.blob_refs[blob]

    def needs_payload(self, job: JobRow) -> bool:
        return not job.ended or self.generation_counts[job.job_id].living > 0

    def count_blob_refs(self) -> dict[BlobId, int]:
        """References counted from the rows: what ``blobs`` must be."""
        found: dict[BlobId, int] = {}
        payloads = [job.spec.payload for job in self.jobs.values() if self.needs_payload(job)]
        states = [job.checkpoint.blob for job in self.jobs.values() if job.checkpoint is not None]
        rows: list[JobRow | AttemptRow] = [*self.jobs.values(), *self.attempts.values()]
        for blob in [*payloads, *states, *(_value(row.outcome) for row in rows)]:
            if blob is not None:
                found[blob] = found.get(blob, 0) + 1
        return found

    # Values of ended jobs

    def _index_value(self, job: JobRow) -> None:
        if job.outcome is not None and job.outcome.value is not None:
            self.value_sizes[job.job_id] = job.outcome.value_bytes
            self.values_bytes += job.outcome.value_bytes

    def drop_value(self, job: JobRow) -> None:
        """Its value is no longer kept."""
        self.values_bytes -= self.value_sizes.pop(job.job_id, 0)


def _value(outcome: Outcome | None) -> BlobId | None:
    return outcome.value if outcome else None
