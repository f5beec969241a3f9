"""Inference of `fray.rl`: requests, and the servers that answer them.

Upwards, each may import those above it:

- `requests`: what is asked of an inference server, and what it answers; plain data, without torch. The engine that
  computes the answers, `fray.rl.tensors.engine`, is below all other modules of this package.
- `decoding`: what happens between two decoding steps, in one thread; `decoding_thread` runs it beside the loop.
- `request_table`: requests by id, who waits for them, and what a repetition gets.
- `server`: the actor; `model_engine`: the engine that it makes of a model.
- `chat_messages`, `tool_calls`, `replies`: conversations and answers; `client`: the model as episodes use it.
- `openai_requests`, `openai_responses`: bodies of OpenAI's API; `openai_app`: its routes; `served_model`: a server of
  requests behind them.
- `http_settings`, `http_port`: the HTTP port of a server.
- `service_client`: NexRL's client for threads; `http_service`: over HTTP.
"""
