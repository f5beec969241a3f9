"""Variables of a job: whose go before whose; and secrets, which reach the process and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

import fray
from fray import EnvironmentConfig, InvalidRequest, Secret
from fray.controller.options import parse
from fray.controller.secret_store import SECRET_LIMIT_CHARS, SecretStore, check_secrets
from fray.model.specs import AttemptSpec, EntryKind, JobSpec
from fray.net.codec import to_json
from fray.node import secrets
from fray.node.job_process.bootstrap import job_variables
from fray.node.logs.redact import Redactor
from fray.node.logs.writer import (
    LINE_LIMIT_BYTES,
    READ_BYTES,
    LineSplitter,
    LogWriter,
)
from fray.node.prepare import PreparedEnvironment
from fray.runtime.process import attempt, current_job
from fray.runtime.serialization import errors

VALUE = "hunter2-and-more"


def spec(**more: object) -> JobSpec:
    return JobSpec(job_id="j-1", name="j", namespace="n", entry=EntryKind.BINARY, argv=("x",), **more)  # type: ignore[arg-type]


def attempt_spec(of: JobSpec, **more: object) -> AttemptSpec:
    return AttemptSpec(attempt_id="j-1:0:0", spec=of, controller="c", key="", **more)  # type: ignore[arg-type]


# Order ----------------------------------------------------------------------------------------------------------------


def test_the_cluster_gives_way_to_what_is_prepared_that_to_the_job_the_job_to_its_secrets_and_all_to_fray() -> None:
    who = ["cluster", "prepared", "job", "secret", "fixed_variables"]

    def from_(name: str) -> dict[str, str]:
        return {f"V{place}": name for place in range(who.index(name), len(who))}

    variables = job_variables(
        attempt_spec(
            spec(env_vars={**from_("job"), "FRAY_JOB_NAME": "forged"}, secrets={"V3": "s", "V4": "s"}),
            cluster_vars={**{f"V{place}": "cluster" for place in range(5)}, "FRAY_JOB_ID": "forged"},
            secrets={"s": "secret"},
        ),
        prepared=PreparedEnvironment(
            variables={f"V{place}": "prepared" for place in range(1, 5)}, fixed_variables={"V4": "fixed_variables"}
        ),
    )
    assert [variables[f"V{place}"] for place in range(5)] == who
    assert (variables["FRAY_JOB_NAME"], variables["FRAY_JOB_ID"]) == ("j", "j-1")


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"FRAY_RANK": "7"}, "names that begin with FRAY_ are reserved for Fray; choose another name"),
        ({"A=B": "x"}, "cannot be the name of a variable"),
        ({"": "x"}, "cannot be the name of a variable"),
        ({"N": 4}, "must be a string: write '4'"),
        ({"N": "a\0b"}, "has a NUL"),
    ],
)
def test_what_cannot_be_a_variable_is_refused_at_the_door(variables: dict[str, str], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        EnvironmentConfig(env_vars=variables)
    with pytest.raises(InvalidRequest, match=match):
        EnvironmentConfig.create(env_vars=variables)


def test_a_controllers_variables_are_written_as_key_and_value() -> None:
    assert parse(["--env", "A=1", "--env", "B=x=y"]).env_vars == {"A": "1", "B": "x=y"}
    for wrong, match in (("A", "write KEY=VALUE"), ("FRAY_A=1", "reserved for Fray")):
        with pytest.raises(InvalidRequest, match=match):
            parse(["--env", wrong])


async def test_a_running_cluster_has_its_variables_from_its_controller() -> None:
    with pytest.raises(InvalidRequest, match="fray-controller --env KEY=VALUE"):
        async with fray.open_cluster("fray://127.0.0.1:1", env_vars={"A": "1"}, token="t"):
            pass


# Secrets --------------------------------------------------------------------------------------------------------------


def test_a_secrets_name_is_a_plain_word() -> None:
    assert repr(Secret("HF_TOKEN")) == "Secret(name='HF_TOKEN')"
    for wrong in ("", "../etc/passwd", "a b", ".hidden", 7):
        with pytest.raises(InvalidRequest, match="a secret's name has"):
            Secret(wrong)  # type: ignore[arg-type]


def test_values_are_in_no_repr_and_no_text_of_a_spec() -> None:
    of = spec(secrets={"TOKEN": "T"})
    for thing in (of, attempt_spec(of, secrets={"T": VALUE}), Redactor({"T": VALUE}), SecretStore()):
        assert VALUE not in repr(thing)
    assert VALUE not in to_json(of)


def test_what_only_the_driver_knows_is_kept_for_living_jobs_alone() -> None:
    book = SecretStore()
    book.add(["j-1", "k-1"], {"T": VALUE})
    wants = spec(secrets={"A": "T", "B": "U"})
    assert book.values_for(wants) == {"T": VALUE}
    assert (book.missing(wants, ()), book.missing(wants, ("U",))) == (["U"], [])
    book.remove_ended(["j-1", "k-1"], lambda job: job == "k-1")
    assert (book.values_for(wants), repr(book)) == ({}, "<SecretStore of 1 jobs>")
    with pytest.raises(InvalidRequest, match="put large ones where the job can read them"):
        book.add(["j-1"], {"T": "x" * (SECRET_LIMIT_CHARS + 1)})


def test_an_unknown_secret_is_refused_with_the_place_to_put_it() -> None:
    wants = spec(secrets={"A": "T"})
    check_secrets([wants], {"T": VALUE}, ())
    check_secrets([wants], {}, {"T"})
    with pytest.raises(InvalidRequest, match="set T in the environment of the driver, or put it into a file T"):
        check_secrets([wants], {"U": VALUE}, {"V"})


def test_an_operators_secrets_are_files_that_other_users_may_not_read(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    directory.mkdir(mode=0o700)
    (directory / "T").write_text(VALUE + "\n")
    (directory / "T").chmod(0o644)
    with pytest.raises(InvalidRequest, match=r"T can be read by others: chmod 600"):
        secrets.check_directory(str(directory))
    (directory / "T").chmod(0o600)
    (directory / ".hidden").write_text("x")
    found = secrets.check_directory(str(directory))
    assert secrets.names(found) == ("T",)
    assert [secrets.read(found, name) for name in ("T", "U", "../T", ".hidden")] == [VALUE, None, None, None]
    assert (secrets.names(""), secrets.read("", "T")) == ((), None)
    with pytest.raises(InvalidRequest, match="not a directory"):
        secrets.check_directory(str(directory / "nothing"))


def test_lines_show_the_name_of_a_secret_and_not_its_value() -> None:
    redact = Redactor({"T": VALUE, "KEY": "-----BEGIN-----\nabcdefghijkl\n-----END-----", "SHORT": "abc"})
    assert redact.hide is not None
    assert redact.hide(f"token={VALUE}!\nabc\nabcdefghijkl\n".encode()) == b"token=[secret T]!\nabc\n[secret KEY]\n"
    assert redact.text(f"bad: {VALUE}") == "bad: [secret T]"
    assert Redactor({"SHORT": "abc"}).hide is None
    assert Redactor({"T": "no-utf8-\udcff"}).hide is not None
    assert Redactor({"T": "no-utf8-\udcff"}).text("bad: no-utf8-\udcff, \udcfe") == "bad: [secret T], \udcfe"
    assert Redactor({}).text("anything") == "anything"


def test_an_error_that_holds_a_secret_arrives_as_text_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_job, "_of_process", attempt_spec(spec(), secrets={"T": VALUE}))
    ended = attempt.failed(ValueError(f"bad token {VALUE}"))
    assert ended.outcome.message == "ValueError: bad token [secret T]"
    assert ended.value is not None
    assert VALUE.encode() not in ended.value
    error = errors.load_error(ended.value)
    assert isinstance(error, fray.RemoteError)
    assert "bad token [secret T]" in str(error)
    kept = attempt.failed(ValueError("harmless"))
    assert isinstance(errors.load_error(kept.value or b""), ValueError)


def test_a_line_that_is_not_whole_yet_is_not_written_where_it_may_hold_a_secret(tmp_path: Path) -> None:
    spool = LogWriter(tmp_path, hide=Redactor({"T": VALUE}).hide)
    spool.write("out", 1.0, f"a {VALUE}\n".encode(), VALUE[:-1].encode())
    spool.close()
    (written,) = tmp_path.iterdir()
    assert b"a [secret T]\n" in written.read_bytes()
    assert VALUE[:-1].encode() not in written.read_bytes()


@pytest.mark.parametrize("before", [LINE_LIMIT_BYTES - 1, LINE_LIMIT_BYTES - len(VALUE) + 1, 2 * LINE_LIMIT_BYTES - 3])
@pytest.mark.parametrize("read_bytes", [READ_BYTES, 7])
def test_a_secret_is_found_where_a_long_line_is_cut(before: int, read_bytes: int) -> None:
    redact = Redactor({"T": VALUE})
    assert redact.hide is not None
    cutter, line = LineSplitter(seam=redact.seam), b"x" * before + VALUE.encode() + b"y" * 100_000 + b"\n"
    lines = b"".join(cutter.feed(line[at : at + read_bytes]) for at in range(0, len(line), read_bytes))
    shown = redact.hide(lines + cutter.flush())
    assert shown.count(b"[secret T]") == 1
    assert shown.count(b"x") == before
    assert max(map(len, shown.split(b"\n"))) <= LINE_LIMIT_BYTES + len("[secret T]")
