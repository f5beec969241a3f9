"""Tunnels inside a channel to the controller, for processes that cannot reach one another.

- `multiplexer`: all tunnels of one channel, with turns and credit.
- `transport`: a tunnel as a `fray.net.transport.Transport` between two processes (addresses ``relay:…``).
- `tls`: TLS inside such a tunnel.
- `byte_stream`: a tunnel as a stream of bytes, for ports of jobs.
"""
