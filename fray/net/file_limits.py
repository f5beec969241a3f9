"""How many descriptors this process may have open.

Daemons take all that they are allowed: of the thousand that most systems give at first, a node needs five for each
attempt, and a controller one for each driver, job and node. What they start has the limit that they were given.
"""

from __future__ import annotations

MAX_DESCRIPTORS = 65_536
"""Some programs try every number there could be; from here on that takes long."""


def raise_limit() -> int:
    """Raise this process's limit as far as it may; returns what it was."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def lower_limit(soft: int) -> None:
    """For this process and what it starts, which may raise it again."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit() -> int:
    """Of this process, as it is now; `MOST` if there is none."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
