"""Verbs ``fray tinker …``: serve training and environments, and look at a service that runs.

- `options`: options of the verbs.
- `serve`: ``fray tinker serve``.
- `game`: ``fray tinker game``.
- `look`: ``fray tinker ls``, ``top``, ``show``, ``explain``, ``cancel``.
- `keys`: ``fray tinker key create``, ``list``, ``revoke``.
- `connection`: the service that a command names.
"""
