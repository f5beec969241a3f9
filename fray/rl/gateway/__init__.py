"""Gateway: agents with an OpenAI client, whose requests are those of an episode.

- `sessions`: the model of one episode behind OpenAI's routes.
- `agent_address`: address of a session, with the key and the authority that a client needs.
- `agent_gateway`: the HTTP server of a rollout process, with a session for each episode that asks for one;
  `agent_url` is its address for the episode that runs.

The module of the server is loaded with the first session: episodes without agents need no HTTP.
"""
