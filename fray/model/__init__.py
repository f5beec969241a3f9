"""Data model: immutable values shared by all processes.

Nothing here does I/O, and of `fray` only `fray.errors` is imported.

Basics, imported by everything else: `frozen` (classes), `ids`, `text`, `backoff`, `service_key`.

- What a job needs: `topology`, `constraints`, then `resources`; `environment`; `requests` (`JobRequest`).
- A job as controller and nodes see it: `specs` (`JobSpec`, desired and observed attempts, outcomes, `JobInfo`), with
  `restart_policy`, `gangs`, `job_groups`, `actors`, `job_text`.
- Machines held for later: `reservations`. Machines that join: `join_tokens`. The operator's policy file: `policy`.
- Files and output of jobs: `workspace`, `log_records`; health, progress and metrics: `monitoring`.
- `messages`: the bodies of control frames, made of all of these. `access`: roles, and who may send which.
"""
