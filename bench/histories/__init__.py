"""History of operations on real processes, and the check of it: records (`records`), small models (`checks`, `orders`),
the files that processes write (`files`), and operations that are worth checking (`clients`).
"""
