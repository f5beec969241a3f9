"""Verbs that look into what runs.

- `options`: their options, without other imports;
- `actor`: living actors, calls of their methods, stacks of their processes;
- `profile`: where the threads of a job spend their time, as a file for speedscope;
- `report`: what the cluster knows of a job, as one archive.
"""
