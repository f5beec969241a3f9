"""One conversation between two processes: codec, session, channel, and the transports under them."""
