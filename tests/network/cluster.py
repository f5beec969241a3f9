"""A Fray cluster on the hosts of a laboratory: real daemons and drivers, each a process of its host."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

from tests.network.host import DISK
from tests.network.laboratory import Host, Laboratory, LaboratoryError, Program

PORT = 7421
STARTED = "controller started"
"""Text in the controller's log when it serves."""
SUSPECT = "node suspect"
READY_S = 60.0


@define(eq=False)
class Answer:
    """Answer of a driver to one line, when it has arrived."""

    line: str
    _arrived: threading.Event = field(factory=threading.Event)
    _found: dict[str, Any] = field(factory=dict)

    def arrive(self, found: dict[str, Any]) -> None:
        self._found = found
        self._arrived.set()

    def is_done(self) -> bool:
        return self._arrived.is_set()

    def wait(self, timeout_s: float = 60.0) -> Answer:
        """Wait for it. Raises TimeoutError."""
        if not self._arrived.wait(timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:g} s: {self.line}")
        return self

    def value(self, timeout_s: float = 60.0) -> Any:
        """Return the value. Raises LaboratoryError if it is an error, and TimeoutError."""
        found = self.wait(timeout_s)._found
        if "error" in found:
            raise LaboratoryError(f"{self.line}: {found['error']}")
        return found["value"]

    def error(self, timeout_s: float = 60.0) -> str:
        """Return type and text of the error; empty if there is none. Raises TimeoutError."""
        return str(self.wait(timeout_s)._found.get("error", ""))

    @property
    def took_s(self) -> float:
        return float(self._found["ended"] - self._found["began"])

    @property
    def ended_at(self) -> float:
        """Time of `time.monotonic`, which all hosts share."""
        return float(self._found["ended"])


class Driver:
    """A driver on a host; see `tests.network.driver` for what it can do."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._answers: dict[int, Answer] = {0: Answer("start")}
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.program.stdout is not None
        for line in self.program.stdout:
            found = json.loads(line)
            self._answers[found["id"]].arrive(found)
        for answer in list(self._answers.values()):
            if not answer.is_done():
                answer.arrive({"error": "the driver has ended", "began": 0.0, "ended": time.monotonic()})

    def start(self, do: str, *args: Any, **options: Any) -> Answer:
        """Send one line; the answer arrives later."""
        assert self.program.stdin is not None
        with self._lock:
            number = len(self._answers)
            answer = self._answers[number] = Answer(f"{do} {args} {options}")
            line = json.dumps({"id": number, "do": do, "args": args, "options": options})
            self.program.stdin.write(f"{line}\n".encode())
        return answer

    def do(self, do: str, *args: Any, timeout_s: float = 60.0, **options: Any) -> Any:
        """Send one line, and return its value. Raises LaboratoryError if it is an error, and TimeoutError."""
        return self.start(do, *args, **options).value(timeout_s)

    def ready(self) -> Driver:
        """Wait until it is connected to the controller."""
        self._answers[0].value(READY_S)
        return self


@define(eq=False)
class TestCluster:
    """Starts daemons and drivers, and waits for nodes."""

    __test__ = False
    laboratory: Laboratory
    controller: Host
    daemons: dict[str, Program] = field(factory=dict)

    @property
    def spec(self) -> str:
        return f"fray://controller:{PORT}"

    @property
    def log(self) -> Path:
        """File with what the controller logs, in all its runs."""
        return self.laboratory.directory / "controller.programs.log"

    def environ(self) -> dict[str, str]:
        """Return the variables that lead programs to the cluster."""
        return {"FRAY_TOKEN": self.token(), "FRAY_CLUSTER_SPEC": self.spec}

    def token(self) -> str:
        """Wait for the token that the controller makes, with the fingerprint of its authority, and return it.

        Raises:
            TimeoutError: the controller has not made it.
        """
        file = self.controller.disk / "store" / "token"
        give_up_at = time.monotonic() + READY_S
        while "#" not in (text := file.read_text().strip() if file.exists() else ""):
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"the controller has made no token within {READY_S:g} s")
            time.sleep(0.02)
        return text

    def start_controller(self, *options: str, altered: str = "") -> Program:
        """Start the controller, or again with the same store; ``altered``: see `tests/network/altered_daemon.py`."""
        argv = ("--listen", f"0.0.0.0:{PORT}", "--store", f"{DISK}/store", "--quarantine-share", "0")
        program = self.controller.run(*command_of("fray.controller.main", altered), *argv, *options)
        self.daemons[self.controller.name] = program
        return program

    def start_node(self, host: Host, *options: str, altered: str = "") -> Program:
        """Start the node of a host, whose attribute ``host`` is the host's name; ``altered`` as `start_controller`."""
        argv = ("--controller", self.spec, "--state-dir", f"{DISK}/node", "--attribute", f"host={host.name}")
        # A variable: an older build, which may run on a host, does not know the option.
        env = {**self.environ(), "FRAY_JOB_UIDS": "none"}
        program = host.run(*command_of("fray.node", altered), *argv, *options, env=env, log="node")
        self.daemons[host.name] = program
        return program

    def open_driver(self, host: Host, tree: str = "") -> Driver:
        """Start a driver, and wait until it is connected. ``tree``: folder on the host with another build of Fray."""
        environ = self.environ()
        if tree:
            environ["PYTHONPATH"] = f"{tree}:{os.getcwd()}"
        # -P: the working directory does not come first in the path.
        argv = (sys.executable, "-P", "-m", "tests.network.driver")
        program = host.run(*argv, env=environ, log="driver", pipes=True)
        return Driver(program).ready()

    def wait_log(self, text: str, times: int = 1, timeout_s: float = READY_S) -> float:
        """Wait until the log of the controller has a text so often; return the time of `time.monotonic` then.

        Raises:
            TimeoutError: it has it less often.
        """
        give_up_at = time.monotonic() + timeout_s
        while self.log.read_text().count(text) < times:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"the controller has not written {text!r} {times} times after {timeout_s:g} s")
            time.sleep(0.02)
        return time.monotonic()

    def wait_state(self, driver: Driver, node: str, state: str, timeout_s: float = READY_S) -> float:
        """Wait until the controller says that a node is in a state; return the time of `time.monotonic` then.

        Raises:
            TimeoutError: it is in another state.
        """
        give_up_at = time.monotonic() + timeout_s
        while (found := driver.do("nodes").get(node)) != state:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"node {node} is {found}, not {state}, after {timeout_s:g} s")
            time.sleep(0.1)
        return time.monotonic()


def command_of(module: str, altered: str) -> tuple[str, ...]:
    """Return the command of a daemon, or of an altered one."""
    return (sys.executable, "-m", *(("tests.network.altered_daemon", altered) if altered else (module,)))


@contextmanager
def open_test_cluster(
    laboratory: Laboratory, *nodes: str, controller_options: tuple[str, ...] = (), altered: str = ""
) -> Iterator[TestCluster]:
    """Yield a cluster of a host ``controller`` and one host for each node, all up; print logs if the block fails.

    ``altered``: change of the controller, see `tests.network.altered_daemon`.
    """
    cluster = TestCluster(laboratory, laboratory.host("controller"))
    try:
        cluster.start_controller(*controller_options, altered=altered)
        for name in nodes:
            cluster.start_node(laboratory.host(name))
        yield cluster
    except BaseException:
        for log in sorted(laboratory.directory.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")
        raise
