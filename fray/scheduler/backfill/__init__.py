"""Backfill: holds on machines for applicants that do not fit, so that later applicants only use gaps.

In order of dependency:

- `starvation`: applicants that have waited too long, and the machines held for them.
- `start_plan`: the latest start of an applicant, by the time limits of what runs.
- `backfill`: the holds of one placement pass (plans, claims, starving applicants), and placement beside them.
"""
