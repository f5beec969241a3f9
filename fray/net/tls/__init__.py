"""TLS 1.3: certificates, and the contexts of both sides of a connection.

- `identity`: a certificate with its key, fingerprints, names, and contexts of the standard library's `ssl`.
- `certificates`: makes and reads certificates, as an authority or for one process. The only module that imports
  `cryptography`, which takes 45 ms: import it where a certificate is made or read.
- `explain`: what a failed handshake means, in the words of an operator.

`fray.net.transports.tls_socket` runs the connections. Nothing here waits.
"""
