"""Large buffers of calls, beside the frames of a channel.

- `chunks`: transfers in chunks over any channel. Pure.
- `segment_allocator`: bookkeeping of shared segments. Pure. `segment_directories`: their directories and locks.
- `shared_memory`: the pool of segments that this process lends to processes of the same host.
- `mapped_segments`: segments borrowed from another process.
"""
