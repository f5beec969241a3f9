"""Health of running attempts: `monitor` runs checks, `counters` decides, `metrics_report` sends measurements."""
