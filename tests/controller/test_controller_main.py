"""The command line of ``fray-controller``, without starting one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fray.controller.options import DEFAULT_LISTEN, check_address, make_token_reader, parse
from fray.errors import InvalidRequest
from fray.model.resources import parse_bytes
from fray.scheduler.state.rows import SchedulerConfig


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("127.0.0.1:7421", "tcp:127.0.0.1:7421"),
        ("tcp:127.0.0.1:0", "tcp:127.0.0.1:0"),
        ("localhost:80", "tcp:localhost:80"),
        ("[::1]:7421", "tcp:[::1]:7421"),
        ("unix:/run/fray.sock", "unix:/run/fray.sock"),
    ],
)
def test_addresses_of_this_machine_are_served_without_further_ado(written: str, meant: str) -> None:
    assert check_address(written, insecure=False) == meant


@pytest.mark.parametrize("written", ["0.0.0.0:1", "10.1.2.3:1", "[::]:1", "my.host:1"])
def test_other_addresses_have_tls(written: str, caplog: pytest.LogCaptureFixture) -> None:
    assert check_address(written, insecure=False) == f"tls:{written}"
    assert not caplog.records
    assert check_address(written, insecure=True) == f"tcp:{written}"
    assert f"INSECURE: traffic of --listen {written} is neither encrypted" in caplog.text


def test_tls_may_be_asked_for_on_this_machine() -> None:
    assert check_address("tls:127.0.0.1:7421", insecure=False) == "tls:127.0.0.1:7421"


def test_public_addresses_are_not_served_without_tls() -> None:
    with pytest.raises(InvalidRequest, match="is a public address"):
        check_address("8.8.8.8:7421", insecure=True)


@pytest.mark.parametrize("written", ["", "7421", ":7421", "host:", "host:port", "127.0.0.1:65536", "unix:", "unix:x"])
def test_what_is_no_address_is_said_to_be_none(written: str) -> None:
    with pytest.raises(InvalidRequest, match="--listen"):
        check_address(written, insecure=True)


def test_the_defaults_are_this_machine_and_the_users_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    options = parse([])
    assert options.listen == (DEFAULT_LISTEN,)
    assert options.store == Path("~/.local/state/fray").expanduser()
    assert options.json_lines is None
    assert parse(["--log-text"]).json_lines is False
    assert parse(["--listen", "unix:/a", "--listen", "unix:/b"]).listen == ("unix:/a", "unix:/b")


def test_a_token_is_taken_from_the_file_then_the_environment_then_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "given").write_text("from the file\n")
    monkeypatch.setenv("FRAY_TOKEN", "from the environment")
    assert make_token_reader(parse(["--token-file", str(tmp_path / "given"), "--store", str(tmp_path)]))() == (
        "from the file",
    )
    assert make_token_reader(parse(["--store", str(tmp_path)]))() == ("from the environment",)
    monkeypatch.delenv("FRAY_TOKEN")
    (made,) = make_token_reader(parse(["--store", str(tmp_path)]))()
    assert made == (tmp_path / "token").read_text().strip()
    assert make_token_reader(parse(["--store", str(tmp_path)]))() == (made,)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--lease-s", "100"], "240 seconds or more"),
        (["--suspect-s", "0"], "1 or more"),
        (["--suspect-s", "900"], "less"),
    ],
)
def test_times_that_cannot_be_kept_are_refused(argv: list[str], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        parse(argv)


def test_the_times_of_the_scheduler_can_be_configured() -> None:
    rules = parse(["--suspect-s", "5", "--lease-s", "300"]).rules
    assert (rules.suspect_s, rules.lease_s) == (5, 300)


def test_how_much_of_a_fleet_may_be_in_quarantine_can_be_chosen() -> None:
    assert parse([]).rules.quarantine_share == SchedulerConfig().quarantine_share
    assert parse(["--quarantine-share", "0"]).rules.quarantine_share == 0
    for share in ("1.1", "-0.1", "nan", "inf"):
        with pytest.raises(InvalidRequest, match=r"--quarantine-share .* must be 0 to 1"):
            parse([f"--quarantine-share={share}"])


def test_how_much_is_kept_of_workspaces_can_be_said() -> None:
    assert parse(["--workspaces", "3GB"]).retention.limit_bytes == parse_bytes("3GB")
    with pytest.raises(InvalidRequest, match="--workspaces"):
        parse(["--workspaces", "much"])
