"""Bridge between sync code on threads and the Trio loop; only these modules import trio and the runtime.

In order of dependency:

    portal              requests of threads to a loop, and ``async with`` blocks that a thread keeps open
    background_loop     whose loop: the job's, an async driver's, or a thread of its own
    mirror              methods that wait for the async method of the same name
    call_sender         actor calls: arguments pickled on the thread, sent by the loop
    pickling            futures and pools that travel to other processes
    objects             references to objects that were put
    remote_generators   items of generator tasks, one by one
"""
