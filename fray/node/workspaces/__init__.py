"""Workspaces on one machine: fetched and stored once for all its nodes, copied for each attempt.

- `reusable_copies`: the copies that ended attempts have left, restored for the next attempts.
- `store`: the directory of contents, trees and chunks, with its locks and its eviction; uses `reusable_copies`.
- `preparer`: fetches a bundle from the controller into the store and prepares an attempt's copy; uses `store`.

The manifest and its chunks are in `fray.model.workspace`; the driver's half is `fray.runtime.workspaces`, the
controller's `fray.controller.workspaces`.
"""
