"""``fray up --ssh``, ``fray status --ssh`` and ``fray down --ssh`` against an OpenSSH server of this test.

The hosts are names in a configuration file of ssh, which all lead to one server at 127.0.0.1: they share its home
directory, as the hosts of many labs do.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from tests.processes.lab import TOKEN, Lab
from tests.support.ports import free_port

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
pytestmark = [
    pytest.mark.skipif(
        SSHD is None or shutil.which("ssh") is None,
        reason="needs an OpenSSH server and client: apt install openssh-server openssh-client",
    ),
    pytest.mark.full,
    pytest.mark.within(400),
]
Command = Callable[..., subprocess.CompletedProcess[str]]
OLD_PYTHON = "#!/bin/sh\nexec {python} -c \"import sys; sys.version_info = (3, 9); sys.version = '3.9.1 x'; $2\"\n"


@frozen
class SshServer:
    """A running server, and a configuration of ssh with names of hosts that lead to it."""

    directory: Path
    home: Path
    """Home directory of its logins."""
    port: int

    def hosts_file(self, controller: str, *hosts: str, more: str = "") -> Path:
        """Write a file of hosts; each of ``hosts`` is the rest of a table."""
        tables = "".join(f"[[hosts]]\n{host}\n" for host in hosts)
        file = self.directory / "hosts.toml"
        file.write_text(
            f'ssh_config = "ssh_config"\n{more}\n[controller]\n{controller}\n'
            f'[defaults]\npython = "{sys.executable}"\npip_options = ["--no-index", "--no-deps"]\n'
            '[defaults.node]\ncpu = 1\nmemory = "1GB"\njob_uids = "none"\n'
            f"{tables}"
        )
        return file


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    directory = tmp_path_factory.mktemp("ssh")
    home = directory / "home"
    home.mkdir(mode=0o700)
    port = free_port()
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True)
    shutil.copy(directory / "user_key.pub", directory / "authorized_keys")
    # The packages that Fray needs are those of this environment, so that nothing is downloaded.
    packages = sysconfig.get_path("purelib")
    (directory / "sshd_config").write_text(
        f"HostKey {directory}/host_key\nAuthorizedKeysFile {directory}/authorized_keys\nStrictModes no\nUsePAM no\n"
        f"PidFile none\nPasswordAuthentication no\nSetEnv HOME={home} PYTHONPATH={packages} LC_ALL=C.UTF-8\n"
        f"ListenAddress 127.0.0.1\nPermitRootLogin yes\nMaxStartups 100\n"
    )
    public = (directory / "host_key.pub").read_text()
    (directory / "known_hosts").write_text(f"known {public}")
    (directory / "ssh_config").write_text(
        "Host one two three old known two.words\n    HostKeyAlias known\n"
        "Host stranger\n    HostKeyAlias unknown\n"
        f"Host closed\n    Port {free_port()}\n"
        f"Host *\n    Hostname 127.0.0.1\n    Port {port}\n    User {getpass.getuser()}\n"
        f"    IdentityFile {directory}/user_key\n    IdentitiesOnly yes\n"
        f"    UserKnownHostsFile {directory}/known_hosts\n    GlobalKnownHostsFile /dev/null\n"
    )
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where a server that is root confines itself
    command = [
        str(SSHD),
        "-D",
        "-e",
        "-f",
        str(directory / "sshd_config"),
        "-p",
        str(port),
        "-o",
        "ListenAddress=127.0.0.1",
    ]
    with (directory / "sshd.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
    try:
        until(lambda: accepts(port), (directory / "sshd.log").read_text)
        yield SshServer(directory, home, port)
    finally:
        process.terminate()
        process.wait(30)


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def until(is_so: Callable[[], bool], why: Callable[[], str] = lambda: "") -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end, why()
        time.sleep(0.05)


@pytest.fixture
def fray(server: SshServer, tmp_path: Path) -> Command:
    """Runs ``fray`` without a cluster in its environment."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("FRAY_")}
    environ |= {"XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "PYTHONPATH": os.getcwd()}

    def run(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fray.cli", *map(str, arguments)]
        return subprocess.run(command, env={**environ, **more}, capture_output=True, text=True, timeout=170)

    return run


def existing(lab: Lab, server: SshServer) -> str:
    """Start a controller, and return what a file of hosts says of it."""
    lab.start_controller()
    lab.wait_serving()
    (server.directory / "token").write_text(TOKEN)
    return f'address = "{lab.spec}"\ntoken_file = "token"'


def record_of(server: SshServer, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((server.home / f".local/share/fray/nodes/{name}/node.json").read_text())
    return found


def results(said: subprocess.CompletedProcess[str]) -> dict[str, str]:
    return {one["name"]: one["result"] for one in json.loads(said.stdout)["hosts"]}


def test_hosts_of_a_file_become_a_cluster_and_each_repetition_changes_what_is_different(
    fray: Command, server: SshServer
) -> None:
    port = free_port()
    place = f'ssh = "one"\nlisten = "127.0.0.1:{port}"\naddress = "fray://127.0.0.1:{port}"'
    hosts = ('ssh = "one"', 'ssh = "two"\nname = "second"')
    file = server.hosts_file(place, *hosts)
    began = fray("up", "--ssh", file)
    assert began.returncode == 0, began.stderr
    assert "one: installing fray" in began.stderr
    assert "second: started" in began.stderr
    try:
        variables = dict(part.split("=", 1) for part in began.stdout.removeprefix("export ").split())
        ran = fray("run", "--memory", "64MB", "--", "echo", "hello", **variables)
        assert (ran.returncode, ran.stdout) == (0, "hello\n"), ran.stderr

        # Tokens are in files that only their owner reads, and in no command line, log or output.
        token = Path(variables["FRAY_TOKEN_FILE"]).read_text().strip()
        home = server.home / ".local/share/fray"
        join_token = (home / "nodes/second/token").read_text().strip()
        assert stat.S_IMODE((home / "nodes/second/token").stat().st_mode) == 0o600
        pid = record_of(server, "second")["pid"]
        logs = [path.read_text(errors="replace") for path in home.glob("*/**/*.log")] + [began.stderr, began.stdout]
        for secret in (token.partition("#")[0], join_token.partition("#")[0]):
            assert not any(secret in text for text in logs)
            assert secret not in Path(f"/proc/{pid}/cmdline").read_text()

        before = record_of(server, "one"), record_of(server, "second")
        again = fray("up", "--ssh", file, "--json")
        assert results(again) == {"one": "unchanged", "second": "unchanged"}, again.stderr
        assert (record_of(server, "one"), record_of(server, "second")) == before

        # A job of a node that is replaced does not notice.
        launched = fray("run", "--detach", "--name", "stays", "--memory", "64MB", "--", "sleep", "1000", **variables)
        assert launched.returncode == 0, launched.stderr
        until(lambda: "running" in fray("jobs", "--prefix", "stays", **variables).stdout)
        shown = json.loads(fray("show", "stays", "--json", **variables).stdout)
        file = server.hosts_file(place, *(f"{host}\nnode = {{ disk = '1GB' }}" for host in hosts))
        changed = fray("up", "--ssh", file, "--json")
        assert results(changed) == {"one": "replaced", "second": "replaced"}, changed.stderr
        assert record_of(server, "second")["pid"] == pid
        after = json.loads(fray("show", "stays", "--json", **variables).stdout)
        assert (after["state"], after["attempts"]) == ("running", shown["attempts"])

        seen = json.loads(fray("status", "--ssh", file, "--json").stdout)
        assert [(one["name"], one["result"], one["state"]) for one in seen["hosts"]] == [
            ("controller", "running", "answers"),
            ("one", "running", "alive"),
            ("second", "running", "alive"),
        ]
    finally:
        ended = fray("down", "--ssh", file, "--yes", "--json")
    assert results(ended) == {"one": "ended", "second": "ended", "controller": "ended"}, ended.stderr
    assert not Path(f"/proc/{pid}").exists()
    assert results(fray("down", "--ssh", file, "--json"))["one"] == "was not running"
    stopped = fray("status", "--ssh", file)
    assert stopped.returncode == 1
    assert "not running" in stopped.stdout
    assert "does not answer" in stopped.stdout
    refused = fray("up", "--ssh", file, "--cpu", "2")
    assert (refused.returncode, "--cpu is for a cluster of this machine" in refused.stderr) == (2, True)
    assert "the cluster says nothing" in stopped.stderr


def test_each_host_that_fails_says_why_and_the_others_join(fray: Command, server: SshServer, lab: Lab) -> None:
    place = existing(lab, server)
    old = server.directory / "old-python"
    old.write_text(OLD_PYTHON.format(python=sys.executable))
    old.chmod(0o755)
    owned = server.home / "owned"
    file = server.hosts_file(
        place,
        *('ssh = "three"', 'ssh = "stranger"', 'ssh = "closed"'),
        *('ssh = "old"\npython = "/no/python"', 'ssh = "one"\nname = "wrong"\nnode = { cpu = -1 }'),
        f'ssh = "two"\nname = "ancient"\npython = "{old}"',
        'ssh = "no-such-user@three"\nname = "unwelcome"',
        'ssh = "known"\nname = "uninstalled"\npackage = "no-such-package-of-fray"',
        f"""ssh = "two.words"\npython = "x'; touch {owned}; $(touch {owned})" """,
    )
    said = fray("up", "--ssh", file, "--json")
    assert said.returncode == 1
    errors = {one["name"]: one["error"] for one in json.loads(said.stdout)["hosts"]}
    assert errors.pop("three") == "", said.stderr
    expected = {
        "stranger": "its host key is unknown or has changed",
        "closed": "it is unreachable (ssh: connect to host 127.0.0.1 port",
        "old": "it has no /no/python: name a Python of 3.11 or later",
        "wrong": "its fray-node has ended; the end of its log:\n    fray-node: cpu=-1",
        "ancient": f"{old} is Python 3.9.1 there; Fray needs 3.11",
        "unwelcome": "it accepts none of your keys",
        "uninstalled": "the installation failed: ",
        "two.words": "it has no x'; touch",
    }
    for name, text in expected.items():
        assert errors[name].startswith(text), (name, errors[name])
    assert "8 of 9 hosts failed" in said.stderr
    assert not owned.exists()
    assert "Traceback" not in said.stderr
    assert "three" in fray("nodes", FRAY_CLUSTER_SPEC=lab.spec, FRAY_TOKEN=TOKEN).stdout
    assert results(fray("down", "--ssh", file, "--yes", "--json"))["three"] == "ended"


def test_a_node_that_does_not_join_is_reported_with_its_log(fray: Command, server: SshServer, lab: Lab) -> None:
    place = existing(lab, server)
    # It has the key of another cluster.
    state = server.home / ".local/share/fray/nodes/two/state"
    state.mkdir(parents=True)
    (state / "machine-key.json").write_text(json.dumps({"token": "x", "claim": "y", "key_id": "machine:x", "key": "z"}))
    (state.parent / "token").write_text("")
    file = server.hosts_file(place, 'ssh = "two"', more="join_s = 5")
    said = fray("up", "--ssh", file)
    assert said.returncode == 1
    assert "two: failed: its fray-node has ended; the end of its log:" in said.stderr
    assert "the join token file" in said.stderr


def test_ctrl_c_ends_all_connections(fray: Command, server: SshServer, lab: Lab, tmp_path: Path) -> None:
    place = existing(lab, server)
    slow = server.directory / "slow-python"
    slow.write_text(f"#!/bin/sh\ntouch {server.home}/reached\nexec cat\n")  # it ends with its input
    slow.chmod(0o755)
    file = server.hosts_file(place, f'ssh = "one"\npython = "{slow}"')
    environ = {**os.environ, "PYTHONPATH": os.getcwd(), "XDG_CONFIG_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "fray.cli", "up", "--ssh", str(file)]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE)
    until((server.home / "reached").exists)
    # Of all threads: one of a pool has started it.
    children = [
        pid for each in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in each.read_text().split()
    ]
    assert len(children) == 1
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in said
    assert not Path(f"/proc/{children[0]}").exists()
