"""Control messages: bodies of request, reply and notice frames, by the pair of processes that exchange them.

- `session`: hello, welcome, refusal and goodbye of every channel.
- `client`: drivers, jobs and tools with the controller; `usage`, `history`, `maintenance` and `machine_groups` are
  parts of it.
- `people`: users, keys, namespaces and the audit log; requests of clients, too.
- `node`: nodes with the controller (desired state down, observed state up, logs, metrics).
- `bundles`: workspaces on their way from drivers through the controller to nodes.
- `calls`: callers with actor hosts, beside the calls themselves. `tunnels`: both, through the controller;
  `command_frames`: what passes through the tunnel of a command.

Class names are tags on the wire, and field names are keys (`fray.net.codec`): renaming either changes the protocol. An
empty default must never be changed, since empty fields are not sent.
"""
