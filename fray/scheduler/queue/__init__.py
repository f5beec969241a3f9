"""Queue of what waits for machines, and the order in which it is tried.

In order of dependency:

- `fair_share`: usage of tenants, and their scores.
- `applicant`: what waits (a job, a job group, a reservation), its shape, and what is held for it.
- `indexes`, `queue`: applicants by tenant, band and shape.
- `quotas`: whether an applicant is within its quota, borrows or waits.
- `order`: the order of applicants, by band, quota, score, priority and acceptance.
"""
