"""Outgoing actor calls: from the arguments of a call to its result.

A call passes through three objects: `route.Route` (one actor, whichever incarnation lives) makes and sends it, a
`host_connection.HostConnection` (one host process) keeps it until it is answered, and the `futures.CallFuture` is what
the caller awaits. In the order in which they build on each other:

- `wire`, `flow_control`, `range_set`: the format of calls, windows of streams, sets of numbers;
- `dedup`: the host's record of a caller's calls, so that none runs twice (used by `fray.runtime.actors`);
- `futures`, `streams`: results and items that arrive later;
- `host_connection`, `host_loss`: one connection with its unanswered calls; decisions when its host is lost;
- `route`, `caller`: the way to one actor; all routes and connections of one session.
"""
