"""Utilities by the names of NexRL's guide, whose path this is.

- `logging_utils`: metrics of algorithms.

Nothing else belongs here. What has a name of its own
has a module of that name.
"""
