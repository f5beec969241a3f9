"""Weights on their way from the trainer to the inference servers.

The trainer publishes a version; the controller and the coordinator have a reference; servers read what it refers to.

- `published`: the weights of one version, in shared memory or in a file, and which versions are kept.
"""
