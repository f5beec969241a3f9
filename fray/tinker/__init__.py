"""Training as a service: OpenTinker's protocol over the trainers and engines of `fray.rl`. In progress.

Upwards, each may import those above it:

- `wire`: codecs of what travels, as pure functions.

Importing this package loads neither torch nor Trio.
"""
