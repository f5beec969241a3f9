"""Runtime: the part of Fray in every process that runs user code, of a job or of a driver.

Upwards, each may import those above it:

- `serialization`, `threads`, `current_call`, `cancellation`, `deadlock`, `background`, `waits`, `notebook_cells`: tools
  without a cluster;
- `calls`: outgoing actor calls; `controller_client`: the connection to the controller, and `logs` read through it;
- `runtime`: the `Runtime` value, one process's place in a cluster; `services`: what the layers above attach to it;
- `actors`: the actors this process serves; `objects`: exported futures and stored objects;
- `workspaces`, `scope`: uploads for jobs, and the scopes in which jobs and actors are launched; `port_forward`;
- `open`: opens a `Runtime` with all of these parts;
- `tasks`: the workers of pools; `process`: one attempt of a job, what its code learns of it and reports;
- `__main__`: the main module of a job's process.

`fray.api` and `fray.blocking` are the public faces of all this; controller and node share only `model` and `net`.
"""
