"""Routes below ``/fray`` for operators of the service, and the file by which commands find it.

- `shown_runs`: models, samplers and checkpoints of the Tinker API.
- `routes`: jobs with what they wait for, use by user, keys.
- `operator_file`: address and key of a running service, in its directory.

The commands are in `fray.cli.tinker`; what they do is a request to these routes, or the scheduler's.
"""
