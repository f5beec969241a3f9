"""Code of the node that runs in the process of an attempt.

- `bootstrap`: turns a forked zygote into the process of an attempt, before user code.
- `gang_variables`: environment variables for distributed frameworks (torch, JAX, MPI).
- `outcome_file`: the file in which a process leaves its result or its error for the shim.
"""
