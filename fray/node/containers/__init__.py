"""Jobs in containers, with docker or podman.

- `engine`: finds the engine of this machine and writes the command line of a job; used by the shim, too.
- `images`: pulls images and removes leftover containers; uses `engine`.

The shim's part is `fray.node.shim.container_plugin`.
"""
