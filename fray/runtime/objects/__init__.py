"""Futures and objects of this process that other processes use.

In the order in which they build on each other:

- `exports`: the internal actor through which other processes call pickled futures and stored objects;
- `imported_future`: the futures of other processes, as they arrive here;
- `refcount`: which process holds which object, and which object to spill next (pure);
- `store`: the objects this process owns: stored, shared, spilled;
- `host_copies`: objects of other hosts, received once for all readers of this host;
- `references`: the objects this process holds references to, and the updates to their owners.
"""
