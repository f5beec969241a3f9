"""Supervised channels: numbered frames that survive the loss of connections.

- `versions`: what two releases have in common (pure).
- `session`: pure state of one session: numbering, acknowledgement, resumption, heartbeat.
- `connection`: reader, writer and clock of one connection.
- `channel`: `Channel` and `Handler`, common to both ends.
- `dialer` and `acceptor`: the two ends, which connect, resume and give up.
- `requests`: requests by id over a channel, answered once each.
- `public`: the names that other packages import.
"""
