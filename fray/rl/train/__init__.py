"""Settings of a trainer and checks of what it is given, without torch: drivers and workers read them, too.

Upwards, each may import those above it:

- `checks`: of numbers and names. `lora`: settings of adapters.
- `settings`: numbers and names of an algorithm, checked when they are written down.
- `datums`: training data and losses of a service.
- `errors`: errors that end a run.
- `trajectory_checks`: problems of a trajectory, before or after it is sent.
- `batch_advantages`: advantages of a batch, by the settings.

`fray.rl.tensors.policy_trainer` trains by them.
"""
