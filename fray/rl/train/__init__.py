"""Settings of a trainer and checks of what it is given, without torch: drivers and workers read them, too.

Upwards, each may import those above it:

- `settings`: numbers and names of an algorithm, checked when they are written down.

`fray.rl.tensors.policy_trainer` trains by them.
"""
