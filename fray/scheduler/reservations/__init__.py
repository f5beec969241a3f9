"""Reservations: machines that are held for jobs that come later.

In order of dependency:

- `events`: numbered events of a reservation.
- `release_units`: which units are idle, which jobs end for a release, and after what notice.
- `reclaim_surplus`: units beyond the minimum for applicants that need them.
- `reservations`: requests, granting, loss of machines, expiry and release.
- `view`: reservations for clients, and explanations.
"""
