"""The laboratory itself: hosts of their own, faults that do what they say, and nothing that is left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.network.laboratory import Host, Laboratory, Program
from tests.network.namespaces import reason_to_skip

SERVER = """
import socket, sys
server = socket.create_server(("", 5000))
print("listening", flush=True)
while True:
    peer, address = server.accept()
    data = peer.recv(100)
    print(address[0], flush=True)
    while data:
        peer.sendall(data)
        try:
            data = peer.recv(100)
        except OSError:
            break
"""
DIAL = """
import socket
try:
    with socket.create_connection(("server", 5000), timeout=1.5) as peer:
        peer.sendall(b"x")
        print("answered" if peer.recv(1) else "closed")
except OSError as error:
    print(type(error).__name__, error.errno or "")
"""
HOLD = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def start_server(lab: Laboratory) -> tuple[Host, Program]:
    host = lab.host("server")
    program = host.run(sys.executable, "-c", SERVER, pipes=True)
    assert program.stdout is not None
    assert program.stdout.readline() == b"listening\n"
    return host, program


def dial(host: Host) -> str:
    return host.output_of(sys.executable, "-c", DIAL).strip()


@pytest.mark.in_test_all
def test_hosts_have_processes_files_and_names_of_their_own(lab: Laboratory) -> None:
    a, b = lab.host("a"), lab.host("b")
    assert [host.output_of("hostname").strip() for host in (a, b)] == ["a", "b"]
    a.output_of("sh", "-c", "echo mine > /tmp/file; echo mine > /dev/shm/file; echo mine > /tmp/disk/file")
    assert "file" not in b.output_of("ls", "/tmp", "/dev/shm", "/tmp/disk")
    assert int(b.output_of("sh", "-c", "ls -d /proc/[0-9]* | wc -l")) < 5
    boot = "/proc/sys/kernel/random/boot_id"
    before = a.output_of("cat", boot)
    assert before not in (b.output_of("cat", boot), Path(boot).read_text())
    a.reboot()
    assert a.output_of("cat", boot) != before
    assert a.output_of("cat", "/tmp/disk/file") == "mine\n", "its disk survives"
    assert "file" not in a.output_of("ls", "/tmp", "/dev/shm")


def test_faults_are_seen_by_dialers_as_real_ones(lab: Laboratory) -> None:
    server, program = start_server(lab)
    other, laptop = lab.host("other"), lab.host("laptop", behind_nat=True)
    assert program.stdout is not None
    assert [dial(other), dial(laptop)] == ["answered", "answered"]
    assert [program.stdout.readline().decode().strip() for _ in range(2)] == [other.address, "10.77.9.3"]
    lab.firewall("server", except_from="laptop")
    assert [dial(other), dial(laptop)] == ["ConnectionRefusedError 111", "answered"]
    lab.heal()
    lab.cut("server", "other")
    assert [dial(other), dial(laptop)] == ["TimeoutError", "answered"]
    lab.heal("server", "other")
    lab.cut_one_way("server", "other")
    assert dial(other) == "TimeoutError"
    lab.heal()
    lab.reject("other", "server")
    assert dial(other) == "OSError 113"
    lab.heal()
    lab.close_port("server", 5000)
    assert dial(other) == "TimeoutError"
    lab.heal()
    server.change_address("10.77.0.99")
    assert dial(other) == "answered", "its name has the new address"
    seen = lab.seen()
    assert {"delivered", "reset", "drop", "reject"} <= seen.keys()


def test_a_gateway_that_forgets_is_silent_or_gives_a_new_port(lab: Laboratory) -> None:
    start_server(lab)
    long_dial = """
import socket, sys
peer = socket.create_connection(("server", 5000), timeout=1.5)
print("connected", flush=True)
sys.stdin.readline()
try:
    peer.sendall(b"x")
    print("answered" if peer.recv(1) else "closed")
except OSError as error:
    print(type(error).__name__)
"""
    found = {}
    for name, remaps in (("silent", False), ("remapping", True)):
        host = lab.host(name, behind_nat=True, remaps=remaps)
        program = host.run(sys.executable, "-c", long_dial, pipes=True)
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == b"connected\n"
        lab.forget_connections(name)
        program.stdin.write(b"\n")
        found[name] = program.stdout.readline().strip().decode()
        # The server is busy with one connection at a time.
        program.kill()
        lab.hosts["server"].run("true").wait()
    assert found == {"silent": "TimeoutError", "remapping": "ConnectionResetError"}


def test_frozen_processes_do_nothing_until_they_are_thawed(lab: Laboratory) -> None:
    host = lab.host("a")
    program = host.run("cat", pipes=True)
    assert program.stdin is not None
    assert program.stdout is not None
    host.freeze()
    program.stdin.write(b"x\n")
    assert program.is_running()
    host.thaw()
    assert program.stdout.readline() == b"x\n"
    program.stdin.close()
    assert program.wait() == 0


@pytest.mark.in_test_all
def test_nothing_of_a_laboratory_survives_the_death_of_its_tests(tmp_path: Path) -> None:
    if reason_to_skip():
        pytest.skip(reason_to_skip())
    script = f"""
from pathlib import Path
import sys
from tests.network.laboratory import Laboratory
lab = Laboratory(Path({str(tmp_path)!r})).__enter__()
program = lab.host("a").run(sys.executable, "-c", {HOLD!r}, "/tmp/shared/lock", pipes=True)
print(program.stdout.readline().decode(), flush=True)
sys.stdin.read()
"""
    tests = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert tests.stdout is not None
    assert tests.stdout.readline() == b"held\n"
    with (tmp_path / "shared" / "lock").open("a") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(tests.pid, signal.SIGKILL)
        tests.wait()
        fcntl.flock(lock, fcntl.LOCK_EX)  # returns when the program on the host has ended
    assert socket.gethostname() != "a"
