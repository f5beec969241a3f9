"""Preemption: jobs that are ended so that an applicant fits.

In order of dependency:

- `cost`: what is lost when a job is ended, and what ends with it.
- `quota_reclaim`: tenants from which borrowed quota may be reclaimed.
- `candidates`: machines on which victims are sought, and the state of a search that continues in the next step.
- `victims`: the cheapest whole jobs whose end makes room.
- `preemption`: when jobs are preempted and for which applicants; claims to the freed machines.
"""
