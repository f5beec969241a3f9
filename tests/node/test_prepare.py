"""Preparation of an attempt's process: variables, directories, and their precedence."""

from __future__ import annotations

from fray.model.specs import AttemptSpec, EntryKind, JobSpec
from fray.node.job_process.bootstrap import job_variables, working_directory
from fray.node.prepare import PreparedEnvironment


def attempt_spec(cwd: str | None = None, **variables: str) -> AttemptSpec:
    spec = JobSpec(job_id="j", name="j", namespace="n", entry=EntryKind.CALLABLE, env_vars=variables, cwd=cwd)
    return AttemptSpec(attempt_id="j:0:0", spec=spec, controller="unix:/c", key="k", directory="/tmp")


def test_the_job_s_variables_go_before_its_environment_s_and_what_is_firm_before_both() -> None:
    prepared = PreparedEnvironment(
        variables={"PATH": "env", "A": "env", "B": "env"},
        fixed_variables={"B": "fixed_variables", "FRAY_NODE": "fixed_variables"},
    )
    found = job_variables(attempt_spec(A="job", B="job"), prepared=prepared)
    assert (found["PATH"], found["A"], found["B"]) == ("env", "job", "fixed_variables")
    assert found["FRAY_NODE"] == "", "Fray's own go before everything"


def test_secrets_are_in_no_repr() -> None:
    assert "hush" not in repr(PreparedEnvironment(fixed_variables={"TOKEN": "hush"}))


def test_a_job_works_where_its_files_are_then_where_its_author_was_then_in_its_own_directory() -> None:
    assert working_directory(attempt_spec(cwd="/var"), "/usr") == "/usr"
    assert working_directory(attempt_spec(cwd="/var"), None) == "/var"
    assert working_directory(attempt_spec(cwd="/no/such"), None) == "/tmp"
