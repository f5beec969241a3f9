"""Placement of waiting applicants.

`placement` has `place_waiting`, which runs passes over the queue as long as they may place more. It depends on the
queue (order, quotas), on the pools (what fits), on `backfill` (what is held for others) and on `preemption` (which jobs
are ended for an applicant that does not fit), and starts jobs, job groups and reservations on their places. `lending`
has what comes after the passes: jobs placed on the CPUs of the jobs above them, which wait for them.
"""
