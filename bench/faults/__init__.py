"""Hundreds of random kills under load, and after each of them nothing may be left: see `bench.faults.__main__`."""
