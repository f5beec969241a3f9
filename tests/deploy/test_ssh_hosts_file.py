"""The file of ``fray up --ssh``, the wheel of this installation, and what the exit of ``ssh`` means."""

from __future__ import annotations

import tomllib
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

from fray.deploy.ssh.hosts_file import HostsFile, read_hosts_file, toml_text
from fray.deploy.ssh.own_wheel import make_own_wheel
from fray.deploy.ssh.session import explain
from fray.errors import InvalidRequest

CONTROLLER = '[controller]\naddress = "fray://127.0.0.1:1"\n'


def read(tmp_path: Path, text: str) -> HostsFile:
    file = tmp_path / "hosts.toml"
    file.write_text(text)
    return read_hosts_file(file)


def test_hosts_have_the_defaults_and_what_they_say_themselves(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        f"""parallel = 4
        {CONTROLLER}token_file = "token"
        [defaults]
        python = "python3.12"
        extras = ["monitoring"]
        node = {{ cpu = 8, attributes = {{ zone = "a", rack = "1" }} }}
        [[hosts]]
        ssh = "ada@gpu-7"
        [[hosts]]
        ssh = "gpu-8"
        name = "eight"
        python = "~/py/bin/python"
        node = {{ gpus = 4, attributes = {{ rack = "2" }} }}
        """,
    )
    assert found.parallel == 4
    assert found.controller.token_file == str(tmp_path / "token")
    seven, eight = found.hosts
    assert (seven.name, seven.ssh, seven.installation.python) == ("gpu-7", "ada@gpu-7", "python3.12")
    assert (eight.name, eight.installation.python) == ("eight", "~/py/bin/python")
    assert eight.installation.extras == ("monitoring",)
    assert eight.node == {"cpu": 8, "gpus": 4, "attributes": {"zone": "a", "rack": "2"}}
    assert tomllib.loads(toml_text(eight.node)) == eight.node


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[hosts]]\nssh = "-oProxyCommand=touch owned"', "expected a host as it is written after `ssh`"),
        ('[[hosts]]\nssh = "ada@-x"', "expected a host"),
        ('[[hosts]]\nssh = "a b"', "expected a host"),
        ('[[hosts]]\nssh = "a;b"', "expected a host"),
        ("[[hosts]]", "expected a host"),
        ('[[hosts]]\nssh = "a"\nname = "x/../y"', "has no slash"),
        ('[[hosts]]\nssh = "a"\npython = "-c"', "must not begin with a dash"),
        ('[[hosts]]\nssh = "a"\npackage = "--editable=."', "must not begin with a dash"),
        ('[[hosts]]\nssh = "a"\nnode = { controller = "fray://x" }', "controller is decided by this file"),
        ('[[hosts]]\nssh = "a"\npyton = "x"', "unknown key 'pyton'"),
        ('[[hosts]]\nssh = "a"\n[[hosts]]\nssh = "a"', "two hosts have the name 'a'"),
        ('[[hosts]]\nssh = "a"\nservice = "cron"', "must be one of background, systemd"),
        ('[[hosts]]\nssh = "a"\npip_options = ["-q", 1]', "expected a list of strings"),
        ("[defaults]\npyton = 1\n[[hosts]]\nssh = 'a'", "unknown key 'pyton'"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"hosts.toml: .*{message}"):
        read(tmp_path, f"{CONTROLLER}{text}\n")


def test_a_file_without_an_address_of_the_controller_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="needs its address"):
        read(tmp_path, '[[hosts]]\nssh = "a"\n')
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_hosts_file(tmp_path / "missing")


def test_the_wheel_of_this_fray_is_the_same_each_time_and_has_its_dependencies_and_commands() -> None:
    wheel = make_own_wheel()
    assert wheel == make_own_wheel()
    archive = zipfile.ZipFile(BytesIO(wheel.content))
    texts = {
        name.partition("/")[2]: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name
    }
    assert "Requires-Dist: trio" in texts["METADATA"]
    assert "fray-node = fray.node.main:main" in texts["entry_points.txt"]
    assert {"fray/__init__.py", "fray/py.typed", "fray/monitoring/page/index.html"} <= set(archive.namelist())
    recorded = {line.partition(",")[0] for line in texts["RECORD"].splitlines()}
    assert recorded == set(archive.namelist())


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (255, "ssh: Could not resolve hostname a: Name or service not known", "its name is unknown"),
        (255, "ssh: connect to host a port 22: Connection timed out", "it is unreachable"),
        (255, "No ED25519 host key is known for a\nHost key verification failed.", "connect once with `ssh ada@gpu-7`"),
        (255, "ada@a: Permission denied (publickey).", "it accepts none of your keys"),
        (1, "fray-needs-python 3.9.1", "python3 is Python 3.9.1 there; Fray needs 3.11"),
        (127, "sh: 1: exec: python3: not found", "it has no python3"),
        (255, "", "the connection was lost (exit code 255 of ssh: no message)"),
    ],
)
def test_the_exit_of_ssh_says_what_is_wrong(tmp_path: Path, code: int, said: str, expected: str) -> None:
    (host,) = read(tmp_path, f'{CONTROLLER}[[hosts]]\nssh = "ada@gpu-7"\n').hosts
    assert expected in explain(code, said, host)
