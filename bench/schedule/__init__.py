"""How fast and how well the law places: see `__main__`."""
