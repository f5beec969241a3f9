"""Rewards of a training job: uploaded code in a child process, or a reward server.

- `child`: the program of the child process, which runs uploaded code; it imports nothing of Fray.
- `uploaded`: starts it, limits its time and memory, and ends it.
- `remote`: asks a reward server by HTTP.

All of it is sync and runs in the thread of an engine.
"""
