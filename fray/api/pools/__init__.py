"""Pools of actors and of workers.

In order of dependency:

    actor_pool    `ActorPool`: all actors of a name, called as one
    task_stream   results of many tasks with a bounded number in flight, for `WorkerPool.imap`
    task_pool     interface of worker pools: `submit`, `map`, `imap`, `options`
    remote_pool   a worker pool of another process
    worker_pool   `WorkerPool`: the workers' jobs and the queue of tasks
"""
