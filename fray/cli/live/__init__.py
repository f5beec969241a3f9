"""Verbs that hold the terminal while they run.

- `options`: their options, without other imports;
- `terminal`: modes of the terminal, and keys that are pressed;
- `exec`: a command in the environment of a job;
- `top`: a cluster live, on the whole screen.
"""
