"""Decisions of the service, as values and plain functions: no Trio, clock, file, torch.

- `ledger`: requests of a job, executed once each, in order, over restarts.
- `job_states`: states of jobs and the ways between them. `job_queue`: which job starts next, and why the others wait.
- `training_config`: the keys of OpenTinker's configuration that are used. `training_session`: what may be called when.
- `keys`: ids and keys of users.

`tests/tinker/` runs the ledger with lost, doubled, reordered and late requests and lost engines and servers.
"""
