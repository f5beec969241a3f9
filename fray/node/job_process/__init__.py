"""Code that runs in the process of an attempt before user code (`bootstrap`), and the files it leaves
(`outcome_file`)."""
