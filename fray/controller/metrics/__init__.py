"""Measurements that the controller keeps in memory; no decision depends on them.

- `attempt_metrics`: progress, memory and health of attempts as nodes report them;
- `job_counts`: numbers of jobs and reservations, of placements and of ends;
- `loop_delay`: lengths of the passes of the event loop;
- `stack_captures`: stacks of running jobs, on request;
- `usage_history`: samples of the cluster's usage.

The modules do not import one another.
"""
