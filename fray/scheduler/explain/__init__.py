"""Explanations for clients: why jobs wait, when they may start, and how the queue stands.

- `diagnosis` finds the reasons why a job or group waits, as data (`fray.scheduler.reasons` has their text);
- `forecast` tries out what would let a request start, and when; also for requests that were not submitted;
- `explain` composes the whole page about a job;
- `queue_view` lists the queue and the use of users and namespaces;
- `capacity` counts the capacity by kind and zone: used, reserved, idle, out of service.

Each imports only what is before it. All of this only reads the state.
"""
