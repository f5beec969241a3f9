"""The ``fray`` command: what operators and researchers ask of a running cluster. One file a family of verbs."""
