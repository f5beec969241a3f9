"""``fray exec``: commands in the environment of jobs, on real processes of a node."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from fray.cli.main import main
from fray.node.shim.commands import COMMANDS_LIMIT

sys.path.insert(0, str(Path(__file__).parent))
from tests.processes.account_lab import needs_accounts, open_account_lab
from tests.processes.lab import TOKEN, Lab, open_lab
from tests.processes.process_trees import sleeping

LONG_S = 60.0
FRAY = (sys.executable, "-m", "fray.cli")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), "alpha") as lab, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FRAY_CLUSTER_SPEC", lab.spec)
        patch.setenv("FRAY_TOKEN", TOKEN)
        yield lab


def fray(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run([*FRAY, *words], capture_output=True, text=True, timeout=LONG_S, check=False, **options)


def asked(*words: str) -> Any:
    """Answer of another verb, in this process."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(["--json", *words]) == 0
    return json.loads(out.getvalue())


def wait_until(is_so: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def start(name: str, *options: str, script: str = "sleep 1000") -> str:
    """Start a detached job and wait until it runs; return its id."""
    small = ("--cpu", "0.1", "--memory", "200MB")
    launched = asked("run", "--detach", *small, "--name", name, *options, "--", "sh", "-c", script)
    job_id = str(launched["job_id"])
    wait_until(lambda: asked("show", job_id)["state"] == "running")
    return job_id


@pytest.fixture(scope="module")
def job(lab: Lab) -> str:
    """Id of a job that runs until the tests end."""
    return start("held", "--env", "COLOR=green")


def test_a_command_may_end_while_its_input_goes_on(job: str) -> None:
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as endless:
        said = fray("exec", job, "--", "head", "-c", "4", stdin=endless.stdout)
        endless.kill()
    assert (said.returncode, said.stdout, said.stderr) == (0, "y\ny\n", "")


def test_one_command_more_than_the_limit_is_refused_with_words(job: str) -> None:
    def hold() -> subprocess.Popen[bytes]:
        words = [*FRAY, "exec", job, "--", "sh", "-c", "echo held; cat"]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    running = [hold() for _ in range(COMMANDS_LIMIT)]
    for one in running:
        assert one.stdout is not None
        assert one.stdout.readline() == b"held\n"
    said = fray("exec", job, "--", "true")
    assert (said.returncode, said.stderr) == (126, "fray: 16 commands run in this attempt, the limit\n")
    for one in running:
        one.communicate(timeout=LONG_S)
        assert one.returncode == 0
    wait_until(lambda: fray("exec", job, "--", "true").returncode == 0)


def test_an_argument_that_is_not_unicode_refuses_that_command_alone(job: str) -> None:
    said = fray("exec", job, "--", "echo", b"a\xff".decode("utf-8", "surrogateescape"))
    assert said.returncode == 2
    assert "command.argv[1]: 'a\\udcff' is not valid Unicode text" in said.stderr


def test_a_command_has_the_variables_and_the_directory_of_the_job(job: str) -> None:
    said = fray("exec", job, "--", "sh", "-c", "echo $COLOR $FRAY_JOB_ID; pwd; echo odd >&2; exit 7")
    assert said.returncode == 7
    assert said.stdout.splitlines() == [f"green {job}", os.getcwd()]
    assert said.stderr == "odd\n"


def test_input_reaches_it_and_its_end_is_seen(job: str) -> None:
    text = "line\n" * 200_000
    said = fray("exec", job, "--", "cat", input=text)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout == text


def test_json_has_output_and_exit_code(job: str) -> None:
    said = fray("exec", job, "--json", "--", "sh", "-c", "echo out; echo err >&2; kill -9 $$")
    assert said.returncode == 137
    assert json.loads(said.stdout) == {"job_id": job, "member": 0, "exit_code": 137, "out": "out\n", "err": "err\n"}


def test_what_cannot_be_run_is_explained(job: str) -> None:
    said = fray("exec", job, "--", "no-such-program")
    assert said.returncode == 127
    assert "cannot run 'no-such-program': No such file or directory" in said.stderr
    said = fray("exec", job, "--member", "3", "--", "true")
    assert (said.returncode, said.stderr) == (1, f"fray: job {job} is running: it has no living member 3\n")
    ended = fray("run", "--cpu", "0.1", "--name", "over", "--", "true")
    assert ended.returncode == 0
    said = fray("exec", "over", "--", "true")
    assert said.returncode == 2
    assert "is succeeded: commands run in running jobs only" in said.stderr


def test_it_is_in_the_control_group_and_the_namespaces_of_the_job(job: str) -> None:
    attempt = asked("show", job)["attempts"][0]
    look = "readlink /proc/self/ns/pid /proc/self/ns/mnt; cat /proc/self/cgroup"
    inside = fray("exec", job, "--", "sh", "-c", look).stdout
    main = f"/proc/{attempt['pid']}"
    spaces = [os.readlink(f"{main}/ns/{name}") for name in ("pid", "mnt")]
    assert inside == "\n".join([*spaces, Path(f"{main}/cgroup").read_text()])


def test_it_is_recorded_with_its_words(job: str) -> None:
    assert fray("exec", job, "--", "echo", "a b").returncode == 0
    records = asked("audit")
    mine = [record for record in records if record["action"] == "RunCommand"]
    assert mine[-1]["target"] == f"{job} member 0: echo 'a b'"
    assert (mine[-1]["outcome"], mine[-1]["role"]) == ("done", "admin")


def test_ctrl_c_reaches_a_command_without_a_terminal(job: str) -> None:
    command = [
        sys.executable,
        "-m",
        "fray.cli",
        "exec",
        job,
        "--",
        "sh",
        "-c",
        "trap 'echo caught; exit 5' INT; echo on",
    ]
    command[-1] += "; while :; do sleep 0.1; done"
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout as out:
        assert out.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        assert out.read() == "caught\n"
        assert process.wait(timeout=LONG_S) == 5


@needs_accounts
def test_it_has_the_account_of_the_job_and_its_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_account_lab() as accounts:
        monkeypatch.setenv("FRAY_CLUSTER_SPEC", accounts.spec)
        monkeypatch.setenv("FRAY_TOKEN", TOKEN)
        job_id = start("own-account")
        main_process = Path(f"/proc/{asked('show', job_id)['attempts'][0]['pid']}/status").read_text()
        look = "grep -E '^(Uid|Gid|Groups|CapEff|NoNewPrivs|Umask)' /proc/self/status"
        inside = fray("exec", job_id, "--", "sh", "-c", look).stdout.splitlines()
        assert len(inside) == 6
        assert set(inside) <= set(main_process.splitlines())
        with at_terminal("exec", job_id, "--", "sh", "-c", 'stat -c "owner %u." $(tty); id -u; echo $HOME') as person:
            uid = next(line.split()[1] for line in inside if line.startswith("Uid"))
            assert accounts.first <= int(uid) < accounts.first + 8
            person.reads(f"owner {uid}.\r\n{uid}\r\n")
        asked("stop", job_id)


@pytest.mark.parametrize("ended", ["command", "connection", "job"])
def test_all_that_it_has_started_ends_with(lab: Lab, ended: str) -> None:
    job_id = start(f"ends-with-{ended}")
    seconds = {"command": "97531.1", "connection": "97531.2", "job": "97531.3"}[ended]
    # One below it, and one in a session of its own; it ends when it reads a line.
    script = f"sleep {seconds} & setsid sleep {seconds} & read line"
    command = [*FRAY, "exec", job_id, "--", "sh", "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: len(sleeping(seconds)) == 2)
        if ended == "command":
            assert process.stdin is not None
            process.stdin.write(b"enough\n")
            process.stdin.flush()
            assert process.wait(timeout=LONG_S) == 0
        elif ended == "connection":
            process.kill()
        else:
            asked("stop", job_id)
            # 137 if the command was killed before the process that carries it, which then says how it has ended.
            code = process.wait(timeout=LONG_S)
            assert process.stderr is not None
            said = process.stderr.read()
            assert code == 137 or (code == 1 and b"the command was ended with its connection" in said)
    wait_until(lambda: not sleeping(seconds))
    if ended != "job":
        assert asked("show", job_id)["state"] == "running", "the job continues"
        asked("stop", job_id)


# On a terminal -------------------------------------------------------------------------------------------------------


class Person:
    """A person at a terminal in which the command line runs."""

    def __init__(self, terminal: int, process: subprocess.Popen[bytes]) -> None:
        self.terminal, self.process, self.seen = terminal, process, b""

    def reads(self, text: str) -> None:
        """Wait until this is shown, and forget what was shown up to it."""
        while text.encode() not in self.seen:
            there, _, _ = select.select([self.terminal], [], [], LONG_S)
            assert there, self.seen
            self.seen += os.read(self.terminal, 4096)
        self.seen = self.seen.partition(text.encode())[2]

    def types(self, text: str) -> None:
        os.write(self.terminal, text.encode())


@contextmanager
def at_terminal(*words: str) -> Iterator[Person]:
    terminal, inside = pty.openpty()
    modes = termios.tcgetattr(inside)
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 77, 0, 0))
    command = ["setsid", "--ctty", sys.executable, "-m", "fray.cli", *words]
    ends = {"stdin": inside, "stdout": inside, "stderr": inside}
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    process = subprocess.Popen(command, env=own, **ends)  # type: ignore[call-overload]
    try:
        yield Person(terminal, process)
        process.wait(timeout=LONG_S)
        assert termios.tcgetattr(inside) == modes, "the terminal is as it was"
    finally:
        process.kill()
        process.wait()
        os.close(inside)
        os.close(terminal)


def test_a_shell_on_a_terminal_has_its_size_its_signals_and_its_exit_code(job: str) -> None:
    with at_terminal("exec", job, "--", "sh") as person:
        person.types("PS1='ready: '; stty size; echo $TERM\n")
        person.reads("31 77\r\n")
        person.reads("xterm\r\n")
        ioctl(person.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        person.types("while [ \"$(stty size)\" != '40 100' ]; do sleep 0.1; done; echo re''sized\n")
        person.reads("resized\r\n")
        person.types("sleep 97531.4\n")
        wait_until(lambda: sleeping("97531.4"))
        person.types("\x03")
        person.reads("ready: ")
        person.types("exit 9\n")
        assert person.process.wait(timeout=LONG_S) == 9
