"""The node daemon: offers one machine to a cluster and runs attempts on it.

The sub-packages, each of which imports earlier ones only:

* `linux`: process trees, control groups, file and subprocess primitives.
* `logs`: the logs of attempts on disk.
* `resources`: CPUs, devices and limits that an attempt is given.
* `job_process`: what runs in the process of a job before user code, and the outcome it leaves.
* `containers`, `environments`, `workspaces`: images, Python environments and files that attempts need.
* `shim`: the process beside each job that watches and ends it.
* `zygotes`: the processes that fork shims.
* `attempts`: `ProcessLauncher`, which runs attempts as processes.
* `health`: health checks, stall detection and metrics of running attempts.

The modules here: `launcher` (the interface to what runs attempts), `reconcile` (desired to actions, pure), `membership`
(one incarnation in the cluster), `run` and `daemon` (the process), `main` (command line).
"""
