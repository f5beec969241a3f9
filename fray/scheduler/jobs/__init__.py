"""Jobs from submission to their end.

- `queries` (jobs by name, prefix and tree) and `registry` (names of actors) are used by all others;
- `retries` decides whether a job may run again, `node_faults` rates what an end says about its machine, `retention`
  bounds what is remembered;
- `transitions` moves jobs and attempts through their tables, and applies what follows;
- `holds`, `groups` (job groups) and `supervision` (supervised actors) follow the changes of jobs after each event;
- `submit` handles launches and terminations, `checkpoints` the saved states of actors.

Each imports only what is before it.
"""
