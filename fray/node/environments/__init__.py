"""Python environments of jobs on one machine: built with uv, cached by key, shared by all nodes of the machine.

Each module uses only those above it:

- `recipe`: the contents of an environment, its key and the uv commands that build it (pure).
- `overlay`: the links to Fray and its requirements that each environment gets.
- `cache`: the directory of environments, their locks and their eviction.
- `builder`: the process that builds one environment with uv.
- `build_manager`: one build per key, however many attempts wait for it.
- `preparer`: `Environments`, used by the launcher: the environment or container image of an attempt.
"""
