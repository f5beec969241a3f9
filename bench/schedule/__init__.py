"""Speed and quality of placement by the scheduler, on simulated fleets: see `__main__`."""
