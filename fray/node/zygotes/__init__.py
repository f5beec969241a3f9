"""Zygotes: `zygote` is the process that forks shims, `manager` keeps one running, `pool` has one per environment."""
