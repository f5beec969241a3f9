"""Verbs that hold the terminal while they run.

- `options`: their options, without other imports;
- `terminal`: modes of the terminal, and keys that are pressed;
- `top`: a cluster live, on the whole screen.
"""
