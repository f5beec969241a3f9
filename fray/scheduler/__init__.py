"""The scheduler: a pure library; `step.step(state, event, now)` returns effects.

No task, clock, socket or random number in here. The parts, each of which imports only what is before it:

- `lifecycle` (tables of phases), `effects` (events and effects), `reasons` (why something waits);
- `pool` (machines, and what they have free), `queue` (order, fair share, quotas), `state` (rows and indexes);
- `effect_buffer` (effects of one step), `history` (records of what has ended); `jobs` (submission, attempts, retries,
  names, groups), `reservations`, `nodes` (presence, drains, quarantine);
- `preemption`, `backfill` and `placement` (which waiting job gets which machines), `autoscaler` (machine groups);
- `explain` and `views` (what clients see), `sessions` (connected drivers, jobs and tools), `step`.
"""
