"""Parts of `fray.v2.iris_backend`: jobs and actors of `fray.v2` on a cluster of Iris.

From the bottom up: `convert` (translation of requests and states; finds Iris's client library), `jobs` (handles of
jobs) and `actors` (handles, groups, and the process that serves an actor). Iris's client library is imported inside of
functions only, as it may not be installed.
"""
