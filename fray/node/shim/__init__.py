"""The shim: a small process per attempt, between the zygote that forked it and the job it forks (containerd's term).

`main` assembles it around `event_loop`, which knows when and how to end the job (`exit_status`). Everything else a
shim does is
a `plugin`: `output_reader`, `progress_pipe`, `resource_usage`, `cgroup_guard`, `stack_capture`, `container_plugin`.
`spawn` forks the job, `pid_namespace` isolates it, `node_connection` is the socket to the node.
"""
