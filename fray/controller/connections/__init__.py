"""Connections of the controller: one handler for each client and each node, and the gateway that holds them.

What lives where; each part imports only parts above it:

- `validation`, `session_errors`, `relay`: checks of what clients and nodes send, errors for ended sessions, tunnels
  between two connections.
- `waiting_jobs`, `changes`, `subscriptions`: reasons of followed jobs that wait; what changed when; who follows what.
- `access`: the door, which admits requests by role; `client_audit`: records of what a client did.
- `hub`: the gateway as one connection sees it.
- `client_logs`: the feed of new log lines, and the logs of one client. `client_updates`: what waits to be sent to it.
- `keys`: which keys count at the listeners.
- `client`, `client_requests`, `people_requests`, `history_requests`: one client, and a function for each request.
- `node`: the connection of one node.
- `defects`: what follows when an event, an effect or the task of a connection fails.
- `gateway`: greetings, and from effects of the scheduler to connections.
"""
