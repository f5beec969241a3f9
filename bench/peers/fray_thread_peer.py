"""Adapter for `fray` with a sync actor, whose methods run on its own thread."""

from peers import Echo
from peers.fray_peer import Fray


class FrayThread(Fray):
    name = "fray_thread"
    body = Echo


PEER = FrayThread
