"""Health, progress and metrics of running attempts as values.

- `health`: `HealthCheck` and `Progress`, as users write and see them.
- `progress_protocol`: lines that a job's processes write to the progress pipe of their attempt.
- `attempt_metrics`: the latest measurements of an attempt, sent from nodes to clients.
- `accounting`: hours that attempts held of the cluster, and their cost; above the messages.
"""
