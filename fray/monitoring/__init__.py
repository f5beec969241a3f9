"""Numbers of a cluster for Prometheus, over HTTP.

- `exposition`: the metrics of one moment, in the text format of Prometheus; pure.
- `exporter`: a client of the controller, and the HTTP server that answers scrapes.

A program of its own and not a part of the controller: HTTP and formatting take no time of the scheduler's loop, no port
of the controller speaks HTTP, and what is shown is what the role of its key may see. Needs ``fray[monitoring]``.
"""
