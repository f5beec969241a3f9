"""Threads for sync user code, and loops beside it.

- `loop_thread`: a Trio loop in a daemon thread, beside the sync code of a job or a driver;
- `user_threads`: registry of the running threads, so that a `local` cluster can wait for them and name them;
- `executor`: `SerialExecutor`, the interface for the work of one actor, with threads of its own (`ThreadExecutor`) or
  inline in the loop (`InlineExecutor`, for simulation);
- `shared_pool`: one pool of threads with a serial queue for each of many light actors.

Executors and pool return results in bursts, one wake-up of the loop for many calls. They are not general thread pools:
the order of one actor's calls is part of their contract.
"""
