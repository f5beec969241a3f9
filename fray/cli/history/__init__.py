"""Verbs about the past of a cluster.

events      ``fray events``: of one job, or of jobs and machines by user, machine and time
gone        ``fray nodes --all``, and ``fray node show`` of a machine that is gone
capacity    ``fray capacity``: by kind and zone, now or over time
sums        ``fray history`` and ``fray cost``
sql         ``fray sql``, over the tables of ``sql_tables``; ``parquet``: its answers as files
options     their options; it imports only argparse
"""
