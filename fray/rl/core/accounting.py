"""Counts of samples: every sample that was issued is trained, validated, dropped for a reason, or open."""

from __future__ import annotations

from collections import Counter

from attrs import define, field


@define
class SampleCounts:
    """Number of samples by what became of them, since the beginning of the run.

    A sample that is rolled out again, for whatever reason, is not issued a second time.
    """

    issued: int = 0
    """Loaded for rolling out."""
    trained: int = 0
    validated: int = 0
    dropped: Counter[str] = field(factory=Counter)
    """Number of dropped samples by reason."""
    repeated: Counter[str] = field(factory=Counter)
    """Rolled out again, by reason. Not part of the sum."""

    @property
    def open(self) -> int:
        """Number of samples that are waiting, rolled out, in the pool or in training, by the other counts."""
        return self.issued - self.trained - self.validated - sum(self.dropped.values())

    def check(self, found: int) -> None:
        """Compare with the number of open samples that were found by counting. Raises AssertionError."""
        assert self.open == found, (
            f"{self.issued} samples issued = {self.trained} trained + {self.validated} validated"
            f" + {dict(self.dropped)} dropped + {found} open does not hold"
        )
