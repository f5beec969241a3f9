"""What runs in the process of an attempt before user code, and the files it leaves behind."""
