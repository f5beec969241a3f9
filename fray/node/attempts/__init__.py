"""Attempts as processes: each one runs from its spec through preparation and its shim to its outcome.

Each module uses only those above it:

- `shim_connection`: the node's end of the socket to a shim.
- `runner`: one attempt, from its spec to its outcome.
- `process_launcher`: `ProcessLauncher`, the `fray.node.launcher.Launcher` of real nodes; owns all attempts and what an
  earlier run of the node has left.
"""
