"""Decisions of a training run, without torch, Trio, clocks or files, so that a simulation runs the same code.

`tasks` orders what is to be rolled out, `leases` says who has it, `trajectory_store` collects the samples into groups
and batches, `versions` names the weights and says when which may be used, `server_states` follows the inference
servers, `run_state` joins these into one state that is rebuilt from its `journal`; `accounting` counts, `advantages`
computes.
"""
