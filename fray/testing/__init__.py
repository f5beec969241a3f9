"""Tools for tests of Fray and of code that extends it.

- `conformance`: the suite for implementations of `fray.net.transport.Network`.
- Simulated cluster: `sim_cluster` runs the real controller, nodes and drivers in one Trio loop on a virtual clock;
  `fakes` has its network and processes, `sim_cloud`, `sim_devices`, `sim_environments`, `sim_ports` and
  `sim_workspaces` the rest of a machine. `seed` makes it deterministic, `faults` break it, `ground_truth` records what
  really happened, and `stuck_tasks` shows where it waits. The scenarios are in ``tests/simulation``.
- `invariants`: checks of the scheduler's state.
- Simulated TPU cloud: `tpu_cloud` (state), `tpu_server` (its gRPC API), `tpu_hosts` (real nodes on its hosts).
- `wheels`: packages for tests of environments.
"""
