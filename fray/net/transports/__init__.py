"""Implementations of `fray.net.transport.Network`.

- `memory`: inside one process, with faults for simulation. `listener`: authenticated listeners of it and of tunnels.
- `websocket`: TCP and Unix sockets, on top of `sockets` (addresses, dialing, binding), a handshake, and
  `websocket_transport` (messages on a non-blocking socket, with the pure parser `websocket_frames`).
- TLS: `tls_socket` (a non-blocking socket), `tls_dialer` and `tls_listener`, with `fray.net.tls`.
- `pending`: limits of connections in their handshake.
- `handshake`: of dialer and listener, with the pure `http_upgrade`.
- `routed_network`: two networks as one.
"""
