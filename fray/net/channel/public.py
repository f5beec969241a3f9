"""The supervised channel between two processes: one door to its parts.

Law. A channel belongs to two incarnations of processes and outlives its connections. Each sequenced frame is dispatched
once and in order while both remember the session; when one forgot, both start from zero and `Handler.on_reset` says so.
It ends once, for one reason: goodbye, a refusal, a proof that the peer is dead, or patience used up. Loss of a
connection alone ends nothing.

- `fray.net.channel.session`: the table (pure)
- `fray.net.channel.connection`: one connection: reader, writer, clock
- `fray.net.channel.channel`: `Channel` and `Handler`
- `fray.net.channel.dialer`: `run_dialed` and `RedialPolicy`
- `fray.net.channel.acceptor`: `Acceptor`
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
