"""Reading of the logs of jobs.

- `archive`: lines that a machine has copied to storage before it ended;
- `reader`: `LogReader`, which pulls pages of several attempts, merges them by time and follows them.

Lines that are pushed to the terminal of a driver do not come this way: see `fray.runtime.controller_client.logs`. The
writing side is `fray.node.logs`.
"""
