"""Jobs and actors on a cluster of Ray: the extra ``fray[ray]``."""
