"""Communication between two processes, from sockets to supervised channels with requests.

Bottom up, each layer importing only those before it:

- `process_identity`, `file_limits`, `daemon_logging`, `limited_log`, `storage`, `service_manager`: services of the
  operating system.
- `alarm`: a wait for a time that may change.
- `auth`, `codec`: proofs of keys, and frames and messages as bytes. Pure.
- `tls`: certificates and TLS contexts.
- `transport`: the interface of one connection; `transports` implements it in memory and over sockets.
- `buffers`: large buffers beside the frames, as chunks or in shared memory.
- `channel`: numbered frames over successive connections, acceptor, dialer and requests.
- `tunnels`: transports and byte streams inside a channel to the controller.
"""
