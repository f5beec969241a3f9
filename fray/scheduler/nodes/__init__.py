"""Nodes of the cluster: presence, availability, drains and quarantine.

- `view` says whether a node is in service, as text and as the record that clients see;
- `quarantine` takes suspected nodes out of service, and probes them (the evidence is in `jobs.node_faults`);
- `nodes` handles joins, reports, silence and death of nodes;
- `drain` handles cordons and drains of operators, and nodes that announce their shutdown.

Each imports only what is before it.
"""
