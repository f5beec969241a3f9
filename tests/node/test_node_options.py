"""``fray-node``'s command line and file: what comes of it, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fray.controller.options import parse as parse_controller_options
from fray.errors import InvalidRequest
from fray.node.attempts.replacement import OPTION
from fray.node.config import LEASE_MIN_S, LogRules, NodeConfig
from fray.node.daemon import cache_directory
from fray.node.main import main, make_config, parse, parse_controller

ENVIRON = {"FRAY_TOKEN": " secret\n", "XDG_STATE_HOME": "/var/state"}
PIN = "ab" * 32
HERE = ("--controller", "fray://127.0.0.1:7500", "--name", "node-a")


def config(*argv: str, environ: dict[str, str] = ENVIRON) -> NodeConfig:
    return make_config(parse(argv), environ)


def test_a_node_needs_little_more_than_the_controller() -> None:
    made = config(*HERE)
    assert (made.name, made.controller, made.token) == ("node-a", "tcp:127.0.0.1:7500", "secret")
    assert (made.state_dir, made.advertise, made.networked) == ("/var/state/fray/node-node-a", "127.0.0.1", False)
    assert made.capacity.cpu_milli > 0


def test_what_a_machine_offers_is_set_by_options_or_by_the_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('cpu = 3\nmemory = "8GB"\n')
    made = config(*HERE, "--config", str(file), "--cpu", "0.5", "--disk", "1GB", "--gpus", "2").capacity
    assert (made.cpu_milli, made.memory_bytes, made.disk_bytes) == (500, 8 * 2**30, 2**30)
    assert [device.id for device in made.devices if device.kind == "gpu"] == ["gpu-0", "gpu-1"]


@pytest.mark.parametrize(
    ("option", "text", "why"),
    [
        ("--cpu", "0", "cpu=0 must be a number of CPUs above 0"),
        ("--cpu", "nan", "cpu=nan must be a number of CPUs above 0"),
        ("--gpus", "-1", "gpus=-1 must be 0 or more"),
        ("--memory", "much", "memory"),
    ],
)
def test_an_impossible_capacity_is_refused(option: str, text: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        config(*HERE, option, text)


def test_the_token_never_shows() -> None:
    assert "'secret'" not in repr(config(*HERE))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (f"fray://host:1#{PIN}", f"tls:host:1#{PIN}"),
        (f"fray://host#{PIN},{PIN}", f"tls:host:7421#{PIN},{PIN}"),
        ("fray://localhost", "tcp:localhost:7421"),
        ("fray://[::1]:9", "tcp:[::1]:9"),
        ("fray+unix:///run/fray.sock", "unix:/run/fray.sock"),
    ],
)
def test_controllers_are_written_as_everywhere_else(text: str, address: str) -> None:
    assert parse_controller(text) == address


@pytest.mark.parametrize("text", ["host:1", "fray://", "fray://host:port", "fray://host:99999", "http://host"])
def test_what_is_no_controller_is_said_with_an_example(text: str) -> None:
    with pytest.raises(InvalidRequest, match="expected fray://HOST"):
        parse_controller(text)


def test_a_range_of_uids_for_jobs_needs_a_private_token_file_and_a_controller_that_they_can_reach(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o644)
    token.write_text("secret")
    uids = ("--job-uids", "200000-200999")
    with pytest.raises(InvalidRequest, match=rf"jobs could read {token}: chmod 600 {token}"):
        config(*HERE, *uids, "--token-file", str(token))
    token.chmod(0o600)
    made = config(*HERE, *uids, "--token-file", str(token))
    assert (made.job_uids, made.state_dir) == ("200000-200999", "/var/lib/fray/node-node-a")
    with pytest.raises(InvalidRequest, match="cannot connect to unix:/run/c; let fray-controller --listen"):
        config("--controller", "fray+unix:///run/c", "--name", "a", *uids)
    with pytest.raises(InvalidRequest, match="expected FIRST-LAST"):
        config(*HERE, "--job-uids", "200000")
    (tmp_path / "node.toml").write_text('job_uids = "200000-200009"\nstate_dir = "/srv/fray"\n')
    made = config(*HERE, "--config", str(tmp_path / "node.toml"))
    assert (made.job_uids, made.state_dir) == ("200000-200009", "/srv/fray")


def test_a_node_that_is_root_has_to_choose_the_accounts_of_jobs_of_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away, environ = ("--controller", f"fray://10.1.2.3#{PIN}", "--name", "a"), {**ENVIRON, "FRAY_JOB_UIDS": "none"}
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(
        InvalidRequest, match=r"by --job-uids 200000-200999 .* jobs are to run as root, write --job-uids none"
    ):
        config(*away)
    (tmp_path / "node.toml").write_text('job_uids = "none"\n')
    for options, variables in (
        (("--job-uids", "none"), ENVIRON),
        (("--config", str(tmp_path / "node.toml")), ENVIRON),
        ((), environ),
    ):
        assert config(*away, *options, environ=variables).job_uids == ""
    for text in ("--job-uids", "200000-200009"), ():
        variables = {**ENVIRON, "FRAY_JOB_UIDS": "none" if text else "200000-200009"}
        assert config(*away, *text, environ=variables).job_uids == "200000-200009"
    # What runs continues as it is, and on one machine there is nothing to choose.
    monkeypatch.setenv("FRAY_TOKEN", "secret")
    assert (main([*away, OPTION]), main(away)) == (0, 2)
    assert config(*HERE).job_uids == ""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert config(*away).job_uids == ""


def test_another_machine_is_dialed_with_tls_only() -> None:
    away = ("--controller", "fray://10.1.2.3", "--name", "a", "--job-uids", "none")
    with pytest.raises(InvalidRequest, match=r"write fray://10\.1\.2\.3#FINGERPRINT, or set FRAY_CA_FINGERPRINT"):
        config(*away)
    environ = {**ENVIRON, "FRAY_CA_FINGERPRINT": PIN.upper()}
    assert config(*away, environ=environ).controller == f"tls:10.1.2.3:7421#{PIN}"
    made = config(*away, environ={**ENVIRON, "FRAY_TOKEN": f"secret#{PIN}\n"})
    assert (made.controller, made.token, made.networked) == (f"tls:10.1.2.3:7421#{PIN}", "secret", True)
    # On this machine there is nothing to be encrypted.
    assert config("--controller", "fray://127.0.0.1", "--name", "a").controller == "tcp:127.0.0.1:7421"


def test_insecure_is_for_private_addresses_and_loud(caplog: pytest.LogCaptureFixture) -> None:
    away = ("--controller", "fray://10.1.2.3", "--name", "a", "--job-uids", "none")
    with pytest.raises(InvalidRequest, match="is a public address"):
        config("--controller", "fray://8.8.8.8", "--name", "a", "--insecure")
    assert config(*away, "--insecure", "--advertise", "10.9.9.9").advertise == "10.9.9.9"
    assert config(*away, "--insecure").networked
    assert "INSECURE: traffic of fray://10.1.2.3 is neither encrypted" in caplog.text


def test_the_file_says_the_same_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(
        'controller = "fray://localhost"\nname = "from-file"\nstate_dir = "/s"\ncpu = 2\nmemory = "1GB"\n'
        '[attributes]\nregion = "here"\n'
    )
    made = config("--config", str(file), "--name", "from-argv")
    assert (made.name, made.state_dir, made.controller) == ("from-argv", "/s", "tcp:localhost:7421")
    assert (made.capacity.cpu_milli, made.capacity.memory_bytes) == (2000, 1024**3)
    assert made.capacity.attributes["region"] == "here"
    made = config("--config", str(file), "--attribute", "region=there", "--attribute", "disk=ssd")
    assert (made.capacity.attributes["region"], made.capacity.attributes["disk"]) == ("there", "ssd")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cpus = 2\n", "unknown key 'cpus'; expected one of advertise"),
        ('cpu = "two"\n', "cpu = 'two' has the wrong type"),
        ("cpu = \n", "node.toml"),
    ],
)
def test_a_file_that_cannot_be_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "node.toml"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=said):
        config(*HERE, "--config", str(file))


@pytest.mark.parametrize(
    ("argv", "environ", "said"),
    [
        ((), ENVIRON, "--controller fray://HOST:PORT"),
        (HERE, {}, "no token given: set FRAY_TOKEN or use --token-file"),
        ((*HERE, "--attribute", "ssd"), ENVIRON, "--attribute 'ssd': expected KEY=VALUE, such as zone=eu-a"),
        ((*HERE, "--name", "a b"), ENVIRON, "cannot be the name of a node"),
    ],
)
def test_what_is_missing_or_wrong_is_said(argv: tuple[str, ...], environ: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        config(*argv, environ=environ)


@pytest.mark.parametrize("parser", [parse, parse_controller_options])
def test_the_help_of_both_daemons_says_how_short_the_lease_may_be(parser: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        parser(["--help"])
    assert f"at least {LEASE_MIN_S:g} (default: 600)" in " ".join(capsys.readouterr().out.split())


def test_the_token_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from file\n")
    assert config(*HERE, "--token-file", str(file)).token == "from file"
    file.write_text("\n")
    with pytest.raises(InvalidRequest, match="is empty"):
        config(*HERE, "--token-file", str(file))


def test_bad_usage_is_one_line_and_status_2(capsys: Any) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err == "fray-node: no controller given: use --controller fray://HOST:PORT\n"


def test_how_much_of_logs_is_kept_is_said_in_sizes_and_seconds(tmp_path: Path) -> None:
    assert config(*HERE).logs == LogRules()
    made = config(*HERE, "--logs-attempt", "1GB", "--logs-age-s", "60", "--logs-archive", "gs://bucket/logs").logs
    assert made == LogRules(attempt_bytes=1024**3, age_s=60.0, archive="gs://bucket/logs")
    (tmp_path / "node.toml").write_text('logs_total = "20GB"\n')
    assert config(*HERE, "--config", str(tmp_path / "node.toml")).logs.total_bytes == 20 * 1024**3
    for wrong in (("--logs-attempt", "1MB"), ("--logs-age-s", "0")):
        with pytest.raises(InvalidRequest, match="logs_"):
            config(*HERE, *wrong)


def test_how_much_of_environments_is_kept_is_the_file_s_to_say(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[environments]\nsize_bytes = "2GB"\nkeep_s = 3600\n')
    found = config(*HERE, "--config", str(file)).environments
    assert (found.size_bytes, found.keep_s, found.build_s) == (2 << 30, 3600, 1800.0)
    file.write_text("[environments]\nage = 3\n")
    with pytest.raises(InvalidRequest, match="expected size_bytes"):
        config(*HERE, "--config", str(file))


def test_the_cache_is_where_it_was_said_to_be_also_for_what_works_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = config(*HERE, "--cache-dir", "cache")
    assert cache_directory(made) == tmp_path / "cache"
