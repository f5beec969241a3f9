"""Workspaces that drivers upload and nodes fetch.

`chunks` stores the chunks, in a directory or in memory. `bundles` (above it) serves requests and decides what is kept.
The unit of transfer and storage is a chunk of a stream of all files, since thousands of files are then a few hundred
chunks.
"""
