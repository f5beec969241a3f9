"""The node daemon: offers one machine to a cluster and runs attempts on it.

The sub-packages, in the order of dependence:

- `linux`: process trees, control groups, removal of directories. `accounts`: an account of each user's jobs.
- `logs`: the logs of attempts on disk. `health`: health checks, stall detection and metrics of running attempts.
- `resources`: CPUs, devices and limits of attempts. `workspaces`, `containers`: files and images that attempts need.
- `job_process`: what runs in the process of a job before user code, and the outcome it leaves.
- `environments`: Python environments, built with uv. `shim`: the process beside each job that watches and ends it.
- `zygotes`: the processes that fork shims. `attempts`: `ProcessLauncher`. `handover`: what a replaced node passes on.

The modules here: `launcher` and `prepare` (interfaces to what runs and prepares attempts), `inventory`, `ports`,
`secrets` (what the machine offers), `reconcile` and `state_reports` (desired and observed attempts, pure), `membership`
(one incarnation in the cluster; uses `controller_requests`, `port_tunnels`, `self_test`), `joining` (join tokens),
`run` (one membership after the other), `daemon` and `embedded_main` (the process), `config` and `main` (command line).
"""
