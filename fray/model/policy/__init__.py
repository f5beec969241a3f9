"""The operator's policy file as values.

- `priority`: priority bands, used by jobs and policies alike.
- `machine_groups`: groups of machines for autoscaling (``[[group]]``), and what providers report.
- `policy`: `Policy` with quotas, shares and preemption rules.
- `parser`: from the tables of the file to a `Policy`, with errors that say what to write instead.
- `name_templates`: job names with placeholders (``{user}/sweep/{index}``), expanded at launch.
"""
