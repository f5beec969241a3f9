"""Recipes: settings of a run from YAML, mappings and DictConfig.

See docs/rl-recipes.md. Upwards:

- `sources`: reads files, overrides and interpolations.
- `typed`: converts them to classes; an error has the path of its key.
- `user_files`: functions and classes by ``file.py:name``.
- `guide_config`: the keys of NexRL's guide.
- `run_recipe`: the keys of `fray.rl.Run`.
- `resolved`: all keys of a run with their values, to be printed.
"""
