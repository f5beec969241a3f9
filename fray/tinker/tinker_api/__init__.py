"""The Tinker API: the `tinker` SDK works against these routes.

- `base_engine`: one engine of adapters for each base model, started again when it is lost.
- `model_run`: the requests of one model, in order. `tinker_runs`: sessions, models, samplers, checkpoints, futures.
- `refusals`: what is not there, has ended, or is beyond a limit.
- `routes`, `rest_routes`: what the SDK calls, as handlers of a class and a table of their paths. `downloads`: saved
  weights as a tar. `openai_routes`: what OpenAI's clients call.
"""
