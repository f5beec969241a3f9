"""OpenTinker's protocol: scheduler, training servers, and a client.

- `answers`: errors and bodies as its clients expect them.
- `scheduler_routes`: users and jobs. `training_routes`: what is below the address of a job.
- `client`: Fray's client, of the shape that OpenTinker's has.

The routes decide nothing: they read requests for `fray.tinker.service` and write what it answers.
"""
