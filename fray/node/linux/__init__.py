"""Linux primitives of the node and the shim, independent of each other.

- `process_tree`: subreaper, parent-death signal, process titles, finding and ending descendants.
- `process_wait`: waiting for a process with a pidfd.
- `cgroups`: creating control groups, limits and usage.
- `remove_tree`: removal of directory trees, also with mounts and read-only directories in them.
"""
