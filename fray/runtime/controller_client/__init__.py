"""Client side of the connection to the controller.

In the order in which they build on each other:

- `request`: the interface by which the trackers send requests;
- `jobs`, `reservations`: records that follow the state of each job and reservation this process follows;
- `pending_jobs`: lines for the user of a driver whose jobs wait;
- `names`, `logs`: subscriptions to the registry and to printed lines; `log_lines` decodes those;
- `client`: `ControllerClient`, the channel itself, which feeds all of these and subscribes again after a reset;
- `large_results`: results of jobs that are too large for messages, in storage.
"""
