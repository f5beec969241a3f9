"""`fray dashboard` and `fray metrics` as processes, and the command line beside them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from tests.processes.lab import Lab


def run_fray(lab: Lab, *words: str) -> str:
    """Run a command that must succeed; return what it prints."""
    command = [sys.executable, "-m", "fray.cli", *words]
    ran = subprocess.run(command, env=lab.environ(), capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def running_dashboard(lab: Lab, *options: str, environ: Mapping[str, str] | None = None) -> AbstractContextManager[str]:
    """Run ``fray dashboard``, as `running_server`."""
    return running_server(lab, "dashboard", *(options or ("--listen", "127.0.0.1:0")), environ=environ)


@contextmanager
def running_server(lab: Lab, verb: str, *options: str, environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a verb that serves HTTP; yield the address that it prints. It ends at Ctrl-C without a word."""
    command = [sys.executable, "-m", "fray.cli", verb, "--json", *options]
    process = subprocess.Popen(
        command,
        env=environ or lab.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        text = "".join(iter(process.stdout.readline, "}\n"))
        assert text, process.communicate()[1]
        yield json.loads(text + "}")["url"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, "Traceback" in errors) == (130, False), errors
    finally:
        process.kill()
        process.communicate()
