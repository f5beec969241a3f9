"""Words shared by every process: frozen, pure, no clock, no I/O."""
