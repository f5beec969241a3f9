"""HTTP ports that other machines reach: with TLS, by a certificate authority of the service itself, and a key.

- `access`: authority and key, which a run or a service keeps in its directory.
- `place`: address and certificate of this process, for its ports.

Runs and `fray.tinker` use it. The cluster's authority issues certificates for controllers and nodes alone: one that a
job could get would be trusted by all who trust the controller.
"""
