"""The async API that `fray` exports: handles and methods on top of `fray.runtime`, for drivers and jobs.

In order of dependency; a module imports only from groups above it:

    jobs            `JobRequest` to job spec, handles of jobs and job groups
    actors          handles of actors, groups and hosts of light actors; monitors and links; queries by name
    async_block, on_failure, futures, job_html, reservation, usage, history, node_admin
                    effects of failures, waiting for several futures, what notebooks show of jobs, reservations, queue,
                    the past, administration of machines
    scope           `Scope`: owner of jobs and actors
    cluster         `Cluster`
    open            `open_cluster`
    pools           `ActorPool`, `WorkerPool` and streams of tasks
    resolver, actor_context, actor_server, port_forward
                    pools by actor name, contexts of methods, serving objects as actors, forwarding ports
"""
