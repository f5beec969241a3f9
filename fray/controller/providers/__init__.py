"""Machine providers: one module for each kind (``tpu`` has four), behind the interface in `base`.

Each kind imports `base` alone: `fixed` (declared machines), `process` (nodes as processes of this machine), `command`
(the operator's own commands), `tpu` (TPU VMs of Google Cloud: `tpu_options`, then `tpu_states`, then `tpu_api`, then
`tpu`). `options` checks the options of all kinds before a policy is accepted.
"""
