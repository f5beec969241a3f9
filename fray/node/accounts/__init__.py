"""Accounts of jobs: on a node that runs as root, each user's jobs run under a uid of their own (``--job-uids``).

Node and shim stay root; the process of a job changes its account before it runs anything of the user. What root writes
for a job is written before the job's directory belongs to the account, and what it reads later is in directories that
do not.

- `uid_range`: the configured range, and what is wrong with one; used by ``fray doctor``, too.
- `switch`: giving directories to an account, and changing to it.
- `leftovers`: what is left of an account on this machine.
- `table`: which user has which account; uses the others.
"""
