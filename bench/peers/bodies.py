"""Actor classes of Fray's adapters, in a module that every process of a job can import."""

from peers import Echo


class LoopEcho(Echo):
    """Actor with an async method, so that it runs in its process's loop, like xoscar's actors."""

    async def wait(self):
        """Do nothing; never called."""
