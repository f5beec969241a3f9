"""The shim: a small process per attempt, between the zygote that forked it and the job it forks (containerd's term).

It never runs user code, so that it can end a job whatever that does. Each line uses only those above it:

- `plugin`: base class of everything a shim does besides ending its job. `spawn`: forks the job.
- `node_connection`: socket to the node. `exit_status`: classifies how a job ended (pure).
- plug-ins: `output_reader` (logs), `progress_pipe`, `resource_usage`, `usage_report`, `cgroup_guard`,
  `container_plugin`, `stack_capture`.
- `event_loop`: waits for everything that can happen to the job, ends it and reports its outcome.
- `pid_namespace`: runs the job in a PID namespace of its own.
- `main`: assembles the loop and its plug-ins in a fresh fork of the zygote; documents the protocol with the node.
"""
