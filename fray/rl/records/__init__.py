"""Files of a run for those who look at it: what it does now, and what was trained in each update.

- `run_files`: settings and status in the output directory, and the runs of this machine by name.
- `steps`: the groups of an update, from the journal, and what failed.
- `trackers`: packages that get the metrics of each update.
- `run_log`: result, metrics, console lines and trackers of a run, as its driver writes them.
- `replay`: updates that are done again from their groups.
"""
