"""Processes of a run.

- `actor_tasks`: what a process does by itself, and not for the call that began it.
- `run_processes`: creates and ends processes, which belong to the controller of the run or to its job.
- `run_servers`: the inference servers.
"""
