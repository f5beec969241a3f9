"""Measurements that the controller keeps in memory; no decision depends on them.

- `attempt_metrics`: progress, memory and health of attempts as nodes report them;
- `stack_captures`: stacks of running jobs, on request;
- `usage_history`: samples of the cluster's usage.

The modules do not import one another.
"""
