"""Fault injection: random kills under load, after which nothing may be left: see `bench.faults.__main__`."""
