"""Attempts as processes: `process_launcher` owns them, `runner` runs one from its spec to its outcome."""
