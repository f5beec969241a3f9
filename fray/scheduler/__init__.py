"""The law: `step(state, event, now) -> effects`. No task, clock, socket or random number in here."""
