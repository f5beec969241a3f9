"""The controller process: runs the scheduler, persists its state and talks to clients and nodes.

What lives where; each part imports only parts above it:

- `blobs`: files of payloads.
- `workspaces`: uploaded workspaces, in chunks, and how long they are kept.
- `metrics`: measurements of attempts, captured stacks, usage over time; all in memory.
- `history`, `store`: the scheduler's rows, events and the past in SQL. `log_cache`, `people`,
  `secret_store`, `join_tokens`, `audit_log`: lines of attempts, users, secrets, how machines join, who did what.
- `accepted_tokens`: the cluster's token, and the previous one while it is replaced.
- `context`: all of these together, as the state that connections share. `restore`: the scheduler's state as it is
  stored. `loop`: the only task that changes the cluster.
- `connections`: the gateway and one handler for each client and each node.
- `providers` and `provider_driver`: where machines come from, and the task that carries out the autoscaler's orders.
- `options`, `policy_file`, `serve`, `main`: command line, policy, and the controller as a task and as a daemon.
"""
