"""Resources of attempts on one node.

- `allocation`: the CPUs, devices and control group of one attempt.
- `cpu_pinning`, `device_variables`: which CPUs an attempt has for itself, and how libraries see its devices (pure).
- `device_holders`: processes that have an accelerator open, so that a device is not granted before it is free.
- `allocator`: grants resources and takes them back; uses the modules above.
- `attempt_limit`: limits running attempts by file descriptors; independent of the others.
"""
