"""One attempt of a job: running it, and what its code learns of it and reports.

- `current_job`: description of the job for its own code (`fray.current_job`), preemption notices, secrets to redact;
- `progress`: reports of progress and health to the node;
- `attempt`: opens the payload and runs it as a function or as an actor; used by `fray.runtime.__main__` in a process of
  its own, by `fray.deploy.local` and by the simulation;
- `health_method`: periodic calls of an actor's own health method;
- `stack_dump`: stacks of threads and tasks for people outside;
- `warmup`: one dummy actor, run in a zygote before it forks;
- `jax_distributed`: registration of gangs with JAX.
"""
