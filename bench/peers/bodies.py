"""The actor bodies of Fray's adapters, in a module that every process of a job can import."""

from peers import Echo


class LoopEcho(Echo):
    """Has an async method, so all of it lives in its process's loop, as xoscar's actors do in theirs."""

    async def wait(self):
        """Not called."""
