"""Controller: jobs as processes, and names of actors, in the process that makes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from iris.rpc import cluster_pb2 as pb

KEY = b"iris stand-in"
OVER = {pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_FAILED, pb.JOB_STATE_KILLED}


@dataclass
class JobRecord:
    job_id: str
    parent: str
    spec: dict[str, Any]
    """Request as `IrisClient.submit` sent it, with a pickled entrypoint."""
    state: int = pb.JOB_STATE_PENDING
    error: str = ""
    failures: int = 0
    run: int = 0
    pid: int = 0
    """Process id while the job runs, once the template has reported it."""
    log: Path = field(default_factory=Path)


class Controller:
    """Listens at ``address``; the end of its ``with`` block ends every job."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="iris-")
        self._listener = Listener(("127.0.0.1", 0), authkey=KEY, backlog=64)
        self.address = "{}:{}".format(*self._listener.address)
        self.jobs: dict[str, JobRecord] = {}
        self._names: dict[tuple[str, str], tuple[str, str]] = {}
        self._lock = threading.RLock()
        self._running: dict[int, JobRecord] = {}
        self._number = 0
        self._logs = 0
        self._over = False
        self._acceptor = threading.Thread(target=self._accept, name="iris-controller", daemon=True)

    def __enter__(self) -> Controller:
        self._template = subprocess.Popen(
            [sys.executable, "-m", "iris.job_main"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._watch, name="iris-template", daemon=True).start()
        self._acceptor.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over = True
        for job_id in list(self.jobs):
            self.terminate(job_id)
        assert self._template.stdin is not None
        self._template.stdin.close()
        self._template.wait(10)
        self._listener.close()
        self._directory.cleanup()

    def _accept(self) -> None:
        while not self._over:
            with suppress(OSError, EOFError):
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(EOFError, OSError):
            while True:
                verb, *args = connection.recv()
                try:
                    connection.send((True, getattr(self, verb)(*args)))
                except Exception as error:  # noqa: BLE001 (the client raises it)
                    connection.send((False, error))

    # Requests of clients ----------------------------------------------------------------------------------------------

    def submit(self, parent: str, spec: dict[str, Any]) -> tuple[bool, str]:
        """Return whether the job is new, and its id."""
        job_id = f"{parent}/{spec['name']}"
        with self._lock:
            known = self.jobs.get(job_id)
            if known is not None and known.state not in OVER:
                return False, job_id
            job = self.jobs[job_id] = JobRecord(job_id, parent, spec)
            # Counted by itself: a name that is submitted again leaves the number of jobs as it was.
            self._logs += 1
            job.log = Path(self._directory.name, f"{self._logs}.log")
            self._start(job)
        return True, job_id

    def _start(self, job: JobRecord) -> None:
        entry = Path(self._directory.name, f"{job.log.stem}.entry")
        entry.write_bytes(job.spec["entrypoint"])
        environment = {
            **job.spec["env_vars"],
            "IRIS_JOB_ID": job.job_id,
            "IRIS_CONTROLLER": self.address,
            "IRIS_PORTS": ",".join(job.spec["ports"]),
        }
        assert self._template.stdin is not None
        self._number += 1
        job.run, job.state = self._number, pb.JOB_STATE_RUNNING
        self._running[job.run] = job
        self._template.stdin.write(json.dumps([job.run, str(entry), str(job.log), environment]) + "\n")
        self._template.stdin.flush()

    def _watch(self) -> None:
        """Read reports of the template: the process of a run, and its exit code."""
        assert self._template.stdout is not None
        for line in self._template.stdout:
            verb, run, number = line.split()
            with self._lock:
                job = self._running[int(run)]
                if verb == "pid":
                    job.pid = int(number)
                    if job.state in OVER:
                        self._kill(job)
                else:
                    job.pid = 0
                    self._ended(job, int(run), int(number))

    def _ended(self, job: JobRecord, run: int, code: int) -> None:
        with self._lock:
            self._names = {key: where for key, where in self._names.items() if where[0] != job.job_id}
            if job.state in OVER or job.run != run:
                return
            if code and job.failures < job.spec["max_retries_failure"] and not self._over:
                job.failures += 1
                self._start(job)
                return
            job.error = f"exit code {code}: {self.logs(job.job_id)[-400:]}" if code else ""
            job.state = pb.JOB_STATE_FAILED if code else pb.JOB_STATE_SUCCEEDED
            self._end_children(job.job_id)

    def terminate(self, job_id: str) -> None:
        with self._lock:
            job = self.jobs[job_id]
            if job.state not in OVER:
                job.state = pb.JOB_STATE_KILLED
                self._kill(job)
            self._end_children(job_id)

    def _kill(self, job: JobRecord) -> None:
        if job.pid:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, 9)

    def _end_children(self, job_id: str) -> None:
        for child in [job.job_id for job in self.jobs.values() if job.parent == job_id and job.state not in OVER]:
            self.terminate(child)

    def status(self, job_id: str) -> tuple[int, str]:
        # Under the lock: a state that is read between the two assignments of `_ended` would come without its error.
        with self._lock:
            job = self.jobs[job_id]
            return job.state, job.error

    def logs(self, job_id: str) -> str:
        return self.jobs[job_id].log.read_text(errors="replace")

    def register(self, job_id: str, name: str, address: str) -> None:
        with self._lock:
            self._names[_namespace(job_id), name] = (job_id, address)

    def unregister(self, job_id: str, name: str) -> None:
        with self._lock:
            self._names.pop((_namespace(job_id), name), None)

    def resolve(self, job_id: str, name: str) -> str | None:
        found = self._names.get((_namespace(job_id), name))
        return None if found is None else found[1]


def _namespace(job_id: str) -> str:
    """Return the namespace, which is the root job."""
    return job_id.split("/")[1]
