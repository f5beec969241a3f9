"""Upload of workspaces: the directories whose files travel with a job.

In the order in which they build on each other:

- `files`: which files of a directory are selected, and the limits;
- `bundle`: their manifest and chunks, with a cache of hashes so that an unchanged file is not read again;
- `upload`: sends the chunks that the controller lacks, before the jobs that use them.

The other ends are `fray.controller.workspaces` and `fray.node.workspaces`.
"""
