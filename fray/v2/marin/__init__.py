"""Interface of Marin's own `fray` package where it differs from `fray.v2`. See docs/marin.md.

The flat modules `fray.client`, `fray.actor`, `fray.types`, `fray.local_backend`, `fray.iris_backend`,
`fray.current_client`, `fray.device_flops` and `fray.cluster` re-export names of `fray.v2`, and from here those that
differ: thin subclasses, for which `isinstance` holds across both. From the bottom up:

- `version` (the release that is followed, and the errors for what it does not have), `installed` (a warning where
  `marin-fray` is installed in the same place), `device_flops`.
- `resources` and `requests`: values.
- `clients`: the client of threads, whose jobs return their output as lines, and `current_client`.
"""
