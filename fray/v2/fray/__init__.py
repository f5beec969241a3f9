"""`FrayClient`: jobs and actors of `fray.v2` on a cluster of Fray, built on `fray.blocking`.

From the bottom up: `convert` (requests, resources, environments, states), `current_cluster` (the cluster of objects
that came by pickle), `jobs` and `actors` (handles), `groups` (actor groups), `current_actor` (the current actor, and
actors that this process hosts) and `client` (`FrayClient`, and the client of the running code). `client` imports the
others, and with them `fray.blocking`, only when they are first used.
"""
