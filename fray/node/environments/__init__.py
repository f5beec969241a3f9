"""Environments of jobs on one machine: what one is made of, and how it is made, kept and given up.

`recipe` says what and how (pure), `overlay` what of Fray goes into each, `builder` is the process that makes one with
uv, `cache` the directory that all nodes of a machine share, `builds` has one made however many wait for it, and
`preparer` is what the launcher asks.
"""
