"""Training as a service: OpenTinker's protocol over the trainers and engines of `fray.rl`. In progress.

Upwards, each may import those above it:

- `wire`: codecs of what travels, as pure functions. `core`: what decides, without Trio, clocks and files.
- `store`: users, jobs and requests on disk. `rewards`: uploaded code in a child process, reward servers.

Importing this package loads neither torch nor Trio.
"""
