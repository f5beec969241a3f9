"""Fray's native face with an all-sync actor: its methods run on a thread of their own, beside the loop."""

from peers import Echo
from peers.fray_peer import Fray


class FrayThread(Fray):
    name = "fray_thread"
    body = Echo


PEER = FrayThread
