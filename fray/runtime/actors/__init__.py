"""Actors: the objects that this process serves, and the calls of them that arrive here.

In the order in which they build on each other:

- `metrics`, `methods`, `lifecycle`: counters, public methods of a class, the life of one actor as its own code uses it;
- `incoming_call`, `method_streams`, `method_lookup`: one call with its arguments, answer and items;
- `served_actor`, `async_actor`, `threaded_actor`: an object in the loop or on threads, and its queue;
- `pending_calls`, `caller_session`, `server`: callers, their connections, and the listening server;
- `checkpoints`, `shutdown`: state saved over restarts, and the orderly end of one actor;
- `endpoints`, `light`, `status_watch`: registration with the controller, many actors in one process, the status of one.
"""
