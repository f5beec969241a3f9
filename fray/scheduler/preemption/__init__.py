"""Preemption: jobs that are ended so that an applicant fits.

In order of dependency:

- `cost`: what is lost when a job is ended, and what ends with it.
- `quota_reclaim`: tenants from which borrowed quota may be reclaimed.
- `victims`: the cheapest whole jobs whose end makes room.
- `preemption`: when jobs are preempted and for which applicants; claims to the freed machines.
"""
