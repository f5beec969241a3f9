"""Episodes with environment servers of users: OpenTinker's agent loop, in the process of a job's engine.

Upwards, each may import those above it:

- `client`: requests to the servers, with tries and limits.
- `episodes`: conversations of the model with environments, many at a time, as trajectories.
"""
