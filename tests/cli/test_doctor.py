"""``fray doctor``: what it says about this machine, and about a controller's greeting. With a cluster: test_cli.py."""

from __future__ import annotations

import json
import os
import random
import socket
import time
import tomllib
from argparse import Namespace
from pathlib import Path

import attrs
import pytest
import trio

import fray
from fray.cli.administration import doctor
from fray.cli.administration.doctor import Result, check_controller, check_disk, check_machine, check_nodes
from fray.cli.main import main
from fray.controller.serve import run_controller
from fray.controller.store import Store
from fray.deploy import stored_keys
from fray.model.messages.client import ControllerHello, NodeInfo
from fray.model.messages.node import CLOCK_OFFSET
from fray.model.messages.session import VERSION
from fray.model.resources import PortRange
from fray.net.transports.websocket import WebSocketNetwork
from fray.node.accounts import uid_range
from fray.node.ports import PortClaim, find_ports

HELLO = ControllerHello(cluster_id="c0ffee00", epoch=3, version=fray.__version__, now=1000.0)
NODE = NodeInfo(
    name="alpha", alive=True, cpu_milli=1, cpu_milli_free=1, memory_bytes=1, memory_bytes_free=1,
    details={"fray": fray.__version__},
)  # fmt: skip


def test_without_a_cluster_it_checks_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FRAY_CLUSTER_SPEC", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["doctor", "--json", "--directory", str(tmp_path / "store")]) in (0, 1)
    found = json.loads(capsys.readouterr().out)
    assert {each["check"] for each in found} >= {"version", "account", "cgroups", "own name", "port", "disk", "cluster"}
    assert all(set(each) == {"check", "result", "text", "advice"} for each in found)
    assert all(bool(each["advice"]) is (each["result"] in ("warning", "failed")) for each in found)
    assert any(str(tmp_path / "store") in each["text"] for each in found)
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "skipped  cluster      none given (--cluster, FRAY_CLUSTER_SPEC, `fray login`, `fray up`)"


def test_a_range_of_uids_for_jobs_is_checked_in_one_line_for_each_condition(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passwd, subuid = tmp_path / "passwd", tmp_path / "subuid"
    passwd.write_text("ada:x:310000001:100::/home/ada:/bin/sh\n")
    subuid.write_text("ada:310000002:65536\n")
    monkeypatch.setattr(uid_range, "ACCOUNT_FILES", (passwd,))
    monkeypatch.setattr(uid_range, "SUBORDINATE_FILES", (subuid,))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    lines = [each.line() for each in doctor.check_job_uids("310000000-310000009")]
    assert lines[:3] == [
        "failed   job uids     this is not root, which alone may change the accounts of jobs: start fray-node as root",
        f"failed   job uids     ada of {passwd} has 310000001: choose a range that no account has",
        f"failed   job uids     ada of {subuid} has 310000002-310065537: choose a range outside of it: rootless "
        "containers run under these ids",
    ]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    lines = [each.line() for each in doctor.check_job_uids("320000000-320000009")]
    assert lines[:3] == [
        "ok       job uids     this is root, which may change the accounts of jobs",
        "ok       job uids     no account and no group of this machine is in 320000000-320000009",
        "ok       job uids     no subordinate ids of this machine are in 320000000-320000009",
    ]
    assert [each.line() for each in doctor.check_job_uids("12")] == [
        "failed   job uids     --job-uids 12: expected FIRST-LAST, such as 200000-200999: write --job-uids "
        "200000-200999, for example"
    ]
    # The range of a node is found in its state.
    (tmp_path / "accounts.json").write_text(json.dumps({"uids": "12", "users": {}}))
    assert main(["doctor", "--directory", str(tmp_path)]) == 1
    assert "--job-uids 12: expected FIRST-LAST" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("now", "result", "text"),
    [
        (1004.0, Result.OK, "within 5 s of the controller's"),
        (994.0, Result.WARNING, "6 s behind the controller's"),
        (1600.0, Result.WARNING, "10 min ahead of the controller's"),
        (1602.0, Result.FAILED, "10 min ahead of the controller's"),
    ],
)
def test_clocks_are_compared(now: float, result: Result, text: str) -> None:
    found = next(each for each in check_controller(HELLO, now) if each.check == "clock")
    assert found.result is result
    assert text in found.text


@pytest.mark.parametrize(
    ("offset", "line"),
    [
        ("25 s", "ok       nodes        1 in service"),
        (
            "-31 s",
            "warning  clock        that of node n1 is 31 s behind the controller's: synchronize both (timedatectl",
        ),
        ("700 s", "failed   clock        that of node n1 is 12 min ahead of the controller's: synchronize both"),
    ],
)
def test_clocks_of_nodes_are_compared(offset: str, line: str) -> None:
    node = NodeInfo(
        name="n1",
        alive=True,
        cpu_milli=1,
        cpu_milli_free=1,
        memory_bytes=1,
        memory_bytes_free=1,
        details={"fray": VERSION, CLOCK_OFFSET: offset},
    )
    first = next(iter(doctor.check_nodes([node])))
    assert first.line().startswith(line)


def test_versions_are_compared() -> None:
    (found,) = (
        each for each in check_controller(attrs.evolve(HELLO, version="0.0.9"), 1000.0) if each.check == "version"
    )
    assert found.line() == (
        f"warning  version      controller: fray 0.0.9, here {fray.__version__}: finish the upgrade: "
        "the controller first, then nodes, then drivers (docs/upgrade.md)"
    )
    lines = [
        each.line()
        for each in check_nodes(
            [
                NODE,
                attrs.evolve(NODE, name="beta", alive=False),
                attrs.evolve(NODE, name="gamma", details={}),
                attrs.evolve(NODE, name="delta", standing="cordoned", standing_reason="ada: new disk"),
            ]
        )
    ]
    assert lines[0].startswith("failed   nodes        beta is silent: ")
    assert lines[1].startswith("warning  version      node gamma: fray of an earlier version, here ")
    assert lines[2] == "warning  nodes        delta is cordoned (ada: new disk): fray uncordon NAME"
    assert lines[3] == "ok       nodes        1 in service"


def test_disks_without_space_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limits, result in (((0, 0), Result.OK), ((1 << 60, 0), Result.WARNING), ((1 << 60, 1 << 60), Result.FAILED)):
        monkeypatch.setattr(doctor, "DISK_WARNING_BYTES", limits[0])
        monkeypatch.setattr(doctor, "DISK_LIMIT_BYTES", limits[1])
        assert check_disk(tmp_path / "not" / "made").result is result


@pytest.mark.parametrize(
    ("name", "line"),
    [
        # As drivers read it.
        (b"j\xf6rg", "ok       account      user 1000, counted as 'jörg'"),
        (b"jo\x1brg", r"failed   account      the name 'jo\x1brg' is not printable: set FRAY_USER to one that is"),
        (b"", "warning  account      the user 1000 has no name: set FRAY_USER, by which shares are counted"),
    ],
)
def test_the_name_of_the_user_is_checked_as_drivers_read_it(
    name: bytes, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    monkeypatch.delenv("USER", raising=False)
    monkeypatch.setenv("FRAY_USER", os.fsdecode(name))
    assert next(each for each in check_machine() if each.check == "account").line() == line


def test_the_ports_of_a_node_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Held until the end, so that no node of another test takes them.
    with find_ports(128, random.Random(1)) as claim, socket.socket() as other:
        ports = claim.ports
        taken = doctor.check_node_ports(str(ports))
        assert (taken.check, taken.result) == ("node ports", Result.WARNING)
        assert taken.text.startswith(f"ports {ports} cannot be claimed: another process of this machine, probably a")
        monkeypatch.setattr(doctor, "claim_ports", lambda wanted: PortClaim(wanted, []))
        free = f"ok       node ports   {ports} are free for jobs on this machine"
        assert doctor.check_node_ports(str(ports)).line() == free
        other.bind(("127.0.0.1", ports.first + 5))
        other.listen()
        assert doctor.check_node_ports(str(ports)).line() == (
            f"warning  node ports   other programs listen on 1 of {ports} ({ports.first + 5}): end them, or choose "
            "others with --ports: jobs that get them are placed again"
        )
    assert doctor.check_node_ports("none").result is Result.SKIPPED
    assert doctor.check_node_ports("80-90").line() == (
        "failed   node ports   ports '80-90': expected FIRST-LAST between 1024 and 65535: write --ports 20000-20511, "
        "for example, or none"
    )
    assert doctor.check_node_ports().result is not Result.FAILED


def test_a_machine_whose_ports_are_taken_by_other_nodes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_ports", lambda count, rng: PortClaim(PortRange(20032, 64), []))
    assert doctor.check_node_ports().text == "other nodes of this machine leave 64 ports to another one"


async def lines_of(spec: str) -> list[str]:
    """Return the lines of the report about a cluster and the way there."""
    return [each.line() for each in await doctor.check_cluster(Namespace(cluster=spec, token_file=None))]


async def test_it_says_whether_the_connection_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAY_TOKEN", "a-long-random-token")
    monkeypatch.delenv("FRAY_INSECURE", raising=False)
    addresses = ("tls:127.0.0.1:0", "tcp:127.0.0.1:0")
    async with trio.open_nursery() as nursery:
        token = os.environ["FRAY_TOKEN"]
        running = await nursery.start(run_controller, Store.memory(), WebSocketNetwork(), addresses, token)
        encrypted, plain = (address.partition(":")[2] for address in running.addresses)
        place, _, pin = encrypted.partition("#")
        assert "ok       certificates accepted: TLS 1.3" in await lines_of(f"fray://{encrypted}")
        *_, last = await lines_of(f"fray://{place}#{'ab' * 32}")
        assert last.startswith("failed   certificates ")
        assert "is not the expected server" in last
        assert last.endswith(": compare with `fray ca show` on the controller's machine")
        assert "skipped  certificates none are used on one machine" in await lines_of(f"fray://{plain}")
        monkeypatch.setenv("FRAY_INSECURE", "1")
        # What was pinned is encrypted in any case.
        assert "ok       certificates accepted: TLS 1.3" in await lines_of(f"fray://{place}#{pin}")
        # The same machine, by a name that does not say so.
        assert "warning  certificates FRAY_INSECURE=1: traffic is not encrypted: unset it" in await lines_of(
            f"fray://{plain.replace('127.0.0.1', '127.1')}"
        )
        nursery.cancel_scope.cancel()


def test_a_controller_that_is_not_there_is_found_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FRAY_TOKEN", "x")
    assert main(["doctor", "--cluster", "fray://127.0.0.1:1"]) == 1
    assert "failed   way          nothing accepts connections at 127.0.0.1:1 " in capsys.readouterr().out
    assert main(["doctor", "--cluster", "fray://no-such-host.invalid:7421"]) == 1
    assert "'no-such-host.invalid' cannot be resolved" in capsys.readouterr().out
    assert main(["doctor", "--cluster", "local"]) == 1
    assert "a 'local' cluster exists only within its driver" in capsys.readouterr().out
    token = tmp_path / "token"
    token.write_text("x")
    token.chmod(0o644)
    assert main(["doctor", "--cluster", "fray://127.0.0.1:1", "--token-file", str(token)]) == 1
    assert f"warning  identity     others may read {token}: chmod 600 {token}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("days", "line"),
    [
        (9.0, "ok       identity     ada (user), by the key of a login that is valid for 9 days\n"),
        (
            1.0,
            "warning  identity     the key of ada for fray://127.0.0.1:1 expires in 24 h: ask an admin for an "
            "invitation (`fray user add ada --role user`), then `fray login fray://127.0.0.1:1`\n",
        ),
        (
            -1.0,
            "failed   identity     the key of ada for fray://127.0.0.1:1 has expired: ask an admin for an invitation",
        ),
    ],
)
def test_the_cluster_and_the_key_of_the_last_login_are_checked(
    days: float, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FRAY_TOKEN", raising=False)
    spec = "fray://127.0.0.1:1"
    key = stored_keys.StoredKey(
        spec=spec,
        invitation_id="1",
        secret="x",
        user="ada",
        role="user",
        expires_at=time.time() + days * 86_400 + 60,
    )
    stored_keys.write({"default": spec, "clusters": {"127.0.0.1:1": attrs.asdict(key)}})
    assert main(["doctor"]) == 1
    found = capsys.readouterr().out
    assert line in found
    assert ("nothing accepts connections at 127.0.0.1:1" in found) == (days > 0)


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert VERSION == fray.__version__ == project["project"]["version"]
