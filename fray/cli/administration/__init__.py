"""Verbs for administrators of machines and controllers.

- `doctor`: one line for each thing that is wrong on this machine or on its way to the cluster.
- `backup`: the store of a controller into one file, and back.

- `people`: login, users, keys, namespaces, the audit log.

`backup` uses no connection to a cluster; `doctor` makes its own.
"""
