"""Scopes of children on any machine: structured concurrency for jobs and actors.

In the order in which they build on each other:

- `children`: the table of living children, and which ends are errors (pure);
- `child_environment`: what a child inherits from its parent, and what must be uploaded before it is launched;
- `scope`: `ChildScope`, a nursery with one watcher task per child;
- `interrupts`: Ctrl-C in a driver, delivered at a checkpoint of the main task.

The public scopes of `fray.api.scope` and of `fray.blocking` are made of these.
"""
