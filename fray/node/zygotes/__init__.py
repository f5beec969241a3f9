"""Zygotes: processes that have imported everything a job needs, and fork shims in milliseconds.

Each module uses only those above it:

- `copy_on_write`: prepares the heap before forking.
- `zygote`: the process itself, and its protocol with the node.
- `manager`: keeps one zygote running and sends it requests.
- `pool`: the node's own zygote, and one for each environment in use.
"""
