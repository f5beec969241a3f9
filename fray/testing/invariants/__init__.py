"""Invariants of the scheduler's state, checked by tests after every step.

- `check.check` yields every violation of a state, `check.CommittedOutcomes` those between two states;
- `jobs`, `groups`, `reservations`, `machines` and `slices` have the invariants of these rows;
- `indexes` compares every index with one rebuilt from the rows, and the accounts of quotas with the attempts.

`check` imports all others. A violation is a sentence that names the rows it is about.
"""
