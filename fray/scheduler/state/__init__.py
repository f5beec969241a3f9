"""State of the scheduler: rows, which are stored, and indexes, which are built from them.

In order of dependency:

- `rows`, `reservation_rows`, `unit_rows`: classes of the rows and the limits of the scheduler.
- `owners`: chains of owners of jobs.
- `indexes`: small containers, and counts of the members of jobs and job groups.
- `machine_groups`: units and machine groups of the autoscaler.
- `machine_tables`: all rows, how they are saved; indexes over nodes, reservations and usage.
- `tables`: indexes over jobs, attempts, job groups, sessions and names; loading.
- `state`: `State`, with the queries of the controller.
- `what_if_pool`: hypothetical changes of a pool. `known_capacity`: machines the cluster has or could have.
"""
