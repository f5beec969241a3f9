"""Serialization of user code's objects and errors, and the transfer of their large buffers.

In the order in which they build on each other:

- `number_list`, `diagnose`: lists of numbers as bytes; the search for the part that cannot be pickled;
- `buffers`: a pickled object with out-of-band buffers, copied only if other code may still write to them;
- `tensors`, `pickling`: from objects to such pickles and back; arguments, results, functions;
- `asyncio_note`, `errors`: errors with their type, notes, causes and remote traceback;
- `function_cache`: pickles of functions, reused as long as nothing they refer to has changed;
- `buffer_transfer`: buffers inside a frame, as chunks beside it, or lent in shared memory.
"""
