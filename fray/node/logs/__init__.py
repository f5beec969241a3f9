"""Logs of attempts. The node's disk is authoritative; the controller only caches the last lines.

Each module uses only those above it:

- `redact`: hides the values of secrets (pure).
- `writer`: splits output into lines and writes segments of records (`fray.model.log_records`); runs in the shim.
- `tail`, `pages`: read segments, behind the writer or from any line.
- `store`: a directory per attempt, its retention limits, and `MemoryLogs` for clusters without a disk.
- `archive`, `retention`: copy segments to an archive and remove old ones, in the background.
- `push`: sends new lines to the controller. `options`: command-line options of `fray-node`.
"""
