"""`RayClient`: jobs and actors of `fray.v2` on a cluster of Ray, with the extra ``fray[ray]``.

Only these modules import Ray. From the bottom up:

- plain values without Ray: `specs` (what client, registry and processes send one another), `resources`,
  `environments` (options of Ray), `auth` (token authentication).
- in the processes of Ray: `errors` (errors of user code, pickled), `output_capture`, `process_context` (the job or
  actor whose code a process runs), `job_runner` (a job's task), `tpu` and `gangs` (jobs of several members),
  `actor_host` (Ray actors that call a user's actor).
- `registry`: one Ray actor per driver, which starts its jobs and actors; `registry_access` finds or makes it.
- in the client's process: `handles`, `hosted_actor` (actors that stay in the client's process), `uploads`
  (workspaces), and `backend` (`RayClient`), which puts them together.
"""
