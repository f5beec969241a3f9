"""Health of running attempts.

- `counters`: state machines that decide when a health check has failed or an attempt has stalled (pure).
- `http_check`: one HTTP request of a health check.
- `metrics_report`: sends progress, memory and health of attempts to the controller.
- `monitor`: `HealthMonitor`, with a task for each check; uses the three others.

Progress and answers of user code come from the shim's progress pipe (`fray.node.shim.progress_pipe`).
"""
