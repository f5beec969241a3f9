"""Limit of open file descriptors of this process.

Daemons raise it as far as allowed: of the thousand that most systems grant initially, a node needs five for each
attempt, and a controller one for each driver, job and node. Their children get the original limit.
"""

from __future__ import annotations

MAX_DESCRIPTORS = 65_536
"""Upper bound: some programs loop over all possible descriptors, which takes long beyond this."""


def raise_limit() -> int:
    """Raise this process's limit as far as allowed; return the previous limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def lower_limit(soft: int) -> None:
    """Lower the soft limit of this process and its children, which may raise it again."""
    import resource

    # User code gets the original limit, since `select()` fails for descriptors from 1024 on.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit() -> int:
    """Return the current limit of this process; `MAX_DESCRIPTORS` if it is unlimited."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
