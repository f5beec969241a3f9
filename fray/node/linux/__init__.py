"""Linux primitives: process trees, control groups, waiting for processes, subprocesses, atomic files, removal of
trees."""
