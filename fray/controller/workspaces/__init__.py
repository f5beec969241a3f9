"""Workspaces that drivers upload and nodes fetch.

`chunks` stores the chunks, in a directory or in memory; `possession` has what clients have sent. `bundles` (above them)
serves requests and decides what is kept.
The unit of transfer and storage is a chunk of a stream of all files, since thousands of files are then a few hundred
chunks.
"""
