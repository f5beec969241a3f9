"""Systems for comparison with Fray: their environment (``python -m bench.peers``), and Fray's own adapters.

The comparison harness lies outside the project (`bench.compare` finds it); its package of adapters is called ``peers``,
and the files ``*_peer.py`` here join it.
"""
