"""Components of NexRL's developer guide, by its names. See docs/from-nexrl.md.

They are faces: what a run does is decided in `fray.rl.core` and done by `fray.rl.controller`. Upwards:

- `error_reporter`, `execution`: errors of modules, and calls of a method here or of an actor.
- `activity_tracker`: work in progress, health of modules, metrics.
- `nexrl_module`: the base class of all components.
- `data_loader`, `trajectory_pool`: items for rollout workers, and what they made of them.
- `validator`, `weight_sync_controller`: means of scores; versions of trainer and servers.
- `resource_manager`: actors of roles, by `fray.blocking`.
- `guide_run`, `controller`: a configuration of the guide as a run; above `fray.rl.run`.
"""
