"""Verbs for administrators of machines and controllers.

- `machine_cluster`: a cluster of this machine, up and down; how a cluster stands. `ssh_cluster`: the same on hosts.
- `doctor`: one line for each thing that is wrong on this machine or on its way to the cluster.
- `backup`: the store of a controller into one file, and back. `rotation`: replacing the token in it.
- `metrics`: the numbers of a cluster, for Prometheus; `dashboard`: its page; `serving`: options of both.
- `people`: login, users, keys, namespaces, the audit log.
- `completion`: what may follow a beginning of a command. `man`: manual pages, made of the same parsers.

`backup` and `rotation` use no connection to a cluster; the others but
`people` make their own.
"""
