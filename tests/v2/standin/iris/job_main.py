"""Template process of all jobs: for each line it forks a job's process, and reports its exit code."""

from __future__ import annotations

import json
import os
import select
import sys
import traceback
from pathlib import Path

import cloudpickle

import fray.v2
import fray.v2.iris_backend  # noqa: F401


def main() -> None:
    runs: dict[int, int] = {}
    asked = True
    while asked or runs:
        if asked and select.select([0], [], [], 0.01)[0]:
            lines = os.read(0, 1 << 20)
            asked = bool(lines)
            while lines and not lines.endswith(b"\n"):
                lines += os.read(0, 1 << 20)
            for line in lines.splitlines():
                run, *rest = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    run_job(*rest)
                runs[pid] = run
                print("pid", run, pid, flush=True)
        while runs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            print("end", runs.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


def run_job(entry_file: str, log_file: str, variables: dict[str, str]) -> None:
    """Run the job's process to its end."""
    os.setsid()
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.update(variables)
    code = 1
    try:
        entry = cloudpickle.loads(Path(entry_file).read_bytes())
        if entry.command:
            os.execvp(entry.command[0], entry.command)
        entry.callable(*entry.args, **entry.kwargs)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 (the traceback goes to the log)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
