"""Autoscaler: requests machines of providers for what waits, and deletes idle ones.

- `bin_packing` estimates, without any state, how many units of which groups would hold what waits;
- `view` shows groups and their units to clients;
- `provider_events` applies what providers answer and list, and deletes units;
- `plan` decides every few seconds what to request and what to delete.

Each imports only what is before it. Rows and indexes of units are in `state.unit_rows` and `state.machine_groups`;
the controller carries the orders out.
"""
