"""Verbs ``fray rl …``: runs of reinforcement learning, from recipes, and a look at them.

- `options`: options of the verbs.
- `start`: ``fray rl run``.
- `change`: ``fray rl scale`` and ``stop``.
- `look`: ``fray rl top``, ``show``, ``replay`` and ``ls``.
"""
