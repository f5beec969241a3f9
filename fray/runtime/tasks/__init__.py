"""Workers of a pool: from `submit` to the outcome of a task.

- `policy`: which worker gets which tasks, stealing, retries after a death (pure);
- `task_run`: one task in its worker, on the thread or in the loop;
- `worker`: `TaskWorker`, the actor class in each process of a pool;
- `dispatcher`: `TaskDispatcher`, which carries out the policy with the workers of one pool.

`dispatcher` runs in the process of the pool's owner, `worker` and `task_run` in the workers. The public pools are in
`fray.api.pools`.
"""
