"""Public names of the supervised channel between two processes.

Invariants: a channel belongs to two incarnations of processes and outlives its connections. Each sequenced frame is
dispatched once and in order while both ends remember the session; when one end has lost it, both start from zero and
`Handler.on_reset` reports that. A channel ends once, for one reason: goodbye, a refusal, a proof that the peer is dead,
or a timeout without a connection. Loss of a connection alone ends nothing.
"""

from fray.net.channel.acceptor import Acceptor, OnGreeting
from fray.net.channel.channel import (
    Channel,
    ChannelStats,
    Handler,
    HandlerFactory,
)
from fray.net.channel.dialer import RedialPolicy, run_dialed
from fray.net.codec import MESSAGE_LIMIT_BYTES

__all__ = [
    "MESSAGE_LIMIT_BYTES",
    "Acceptor",
    "Channel",
    "ChannelStats",
    "Handler",
    "HandlerFactory",
    "OnGreeting",
    "RedialPolicy",
    "run_dialed",
]
