"""The ``fray`` command against a running cluster: in this process, but for what only a process can show."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import tarfile
import termios
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from attrs import frozen

import fray
from fray import Entrypoint, JobGroupConfig, JobRequest, JobRole, ResourceConfig
from fray.cli.main import main
from fray.cli.options import parser_of
from fray.cli.run import request_of
from fray.model.monitoring.health import HealthCheck
from fray.node.shim.stack_capture import find_py_spy
from tests.support import job_functions

sys.path.insert(0, str(Path(__file__).parent))
from tests.processes.lab import TOKEN, Lab, open_lab
from tests.simulation.commands import main as simulate

DETACHED = ("run", "--detach", "--cpu", "0.1", "--memory", "50MB", "--name")
SMALL = ResourceConfig.with_cpu(cpu=0.1, memory="50MB")


@frozen
class Said:
    """Result of one command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Fray = Callable[..., Said]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with open_lab(tmp_path_factory.mktemp("lab"), "alpha") as lab:
        yield lab


@pytest.fixture
def run(lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Fray:
    """Run the command as a user would who has said where the cluster is."""
    monkeypatch.setenv("FRAY_CLUSTER_SPEC", lab.spec)
    monkeypatch.setenv("FRAY_TOKEN", TOKEN)

    def run(*words: str) -> Said:
        capfd.readouterr()
        code = main(words)
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err, captured.err
        return Said(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="module")
def jobs(lab: Lab) -> dict[str, str]:
    """Ids of detached jobs by name: one that runs with a child, one that failed, one that waits for room."""

    async def launch() -> dict[str, str]:
        async with fray.open_cluster(lab.spec, token=TOKEN, namespace="lab", logs=False) as cluster:
            await cluster.wait_for_nodes(1)
            made = {}
            for name, fn, resources in (
                ("lab/parent", job_functions.hold_child, SMALL),
                ("lab/broken", job_functions.fail_loudly, SMALL),
                ("lab/huge", job_functions.hang, ResourceConfig.with_cpu(cpu=10_000)),
            ):
                request = JobRequest(
                    name=name, entrypoint=Entrypoint.from_callable(fn), resources=resources, detached=True
                )
                made[name] = await cluster.launch(request)
            await made["lab/broken"].wait_ended()
            while "child" not in [info.name for info in await cluster.list_jobs(states=["running"])]:  # noqa: ASYNC110
                await trio.sleep(0.02)
            return {name: job.id for name, job in made.items()}

    return trio.run(launch)


# Looking -------------------------------------------------------------------------------------------------------------


def test_jobs_are_listed_with_their_states_and_reasons(run: Fray, jobs: dict[str, str]) -> None:
    said = run("jobs", "--namespace", "lab")
    assert said.code == 0
    head, *lines = said.out.splitlines()
    assert head.split() == ["NAME", "STATE", "TIME", "NODE", "ID", "REASON"]
    by_name = {line.split()[0]: line for line in lines}
    assert by_name.keys() == {"lab/parent", "lab/broken", "lab/huge", "child"}
    assert "running" in by_name["lab/parent"]
    assert "alpha" in by_name["lab/parent"]
    assert jobs["lab/parent"] in by_name["lab/parent"]
    assert "no luck" in by_name["lab/broken"]
    assert "10000" in by_name["lab/huge"]


def test_the_queue_and_the_shares_are_shown_and_drawn(run: Fray, jobs: dict[str, str], tmp_path: Path) -> None:
    said = run("queue", "--limit", "5")
    assert said.out.splitlines()[0].split()[:5] == ["#", "ID", "KIND", "USER", "NAMESPACE"]
    assert jobs["lab/huge"] in said.out
    assert jobs["lab/huge"] in [line["id"] for line in run("queue", "--json").json["entries"]]
    usage = run("usage", "--json").json
    assert usage["used"]["cpu"] > 0
    assert run("usage").out.splitlines()[0].startswith("CPUs")
    assert run("usage", "--plot", str(tmp_path / "shares.svg")).code == 0
    assert (tmp_path / "shares.svg").stat().st_size > 1000
    assert run("usage", "--plot", "shares.doc").code == 2


def test_jobs_are_chosen_by_state_and_prefix_and_shown_as_a_tree(run: Fray, jobs: dict[str, str]) -> None:
    assert [info["name"] for info in run("jobs", "--state", "failed", "--prefix", "lab/", "--json").json] == [
        "lab/broken"
    ]
    lines = run("jobs", "--tree", "--state", "running").out.splitlines()
    parent = next(number for number, line in enumerate(lines) if line.startswith("lab/parent"))
    assert lines[parent + 1].startswith("  child ")
    assert [info["name"] for info in run("jobs", "--limit", "1", "--json").json] == ["child"]


def test_the_way_to_the_cluster_is_checked(run: Fray, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    said = run("doctor", "--json")
    found = {(each["check"], each["result"]) for each in said.json}
    assert {("way", "ok"), ("controller", "ok"), ("clock", "ok"), ("nodes", "ok")} <= found, said.out
    assert not {each["check"] for each in said.json if each["result"] == "failed"} - {"disk"}
    monkeypatch.setenv("FRAY_TOKEN", "wrong")
    said = run("doctor")
    assert said.code == 1
    assert "\nfailed   identity " in said.out


def test_a_namespace_of_the_environment_is_the_default_of_all_commands(
    run: Fray, jobs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAY_NAMESPACE", "elsewhere")
    assert run("jobs", "--json").json == []
    assert len(run("jobs", "--json", "-A").json) >= 4
    assert run("show", "lab/parent").code == 1
    assert run("show", "--namespace", "lab", "lab/parent").code == 0


def test_json_has_every_key_also_empty_ones(run: Fray, jobs: dict[str, str]) -> None:
    info = run("show", "--json", jobs["lab/broken"]).json
    assert info["job_id"] == jobs["lab/broken"]
    assert (info["state"], info["cause"], info["exit_code"]) == ("failed", "failure", 1)
    assert {"error_message", "start_time", "end_time", "owner", "reason", "progress", "ended_by"} <= info.keys()
    (attempt,) = info["attempts"]
    assert attempt["node"] == "alpha"
    assert {"attempt_id", "pid", "signal", "peak_memory_bytes", "cpu_s", "captured", "ports"} <= attempt.keys()


def test_show_tells_all_of_a_job(run: Fray, jobs: dict[str, str]) -> None:
    said = run("show", "lab/broken")
    words = dict(line.split(None, 1) for line in said.out.split("\n\n")[0].splitlines() if " " in line)
    assert words["job"] == jobs["lab/broken"]
    assert words["state"].split()[::2] == ["failed", "ago"]
    assert "no luck" in words["reason"]
    assert words["owner"] == "the cluster (detached)"
    assert "ATTEMPT" in said.out
    assert "0.0" in said.out


def test_a_machine_is_taken_out_of_service_and_back(run: Fray, jobs: dict[str, str]) -> None:
    said = run("cordon", "alpha", "--reason", "a fan is loud")
    assert said.out.startswith("alpha  alive, cordoned  is cordoned by ")
    assert "(a fan is loud)" in run("node", "show", "alpha").out
    asked = ("what-if", "--cpu", "0.1", "--memory", "64MB")
    assert "it would start if more machines joined that it can use, or if alpha were back in service" in run(*asked).out
    (drained,) = run("drain", "alpha", "--deadline", "1h", "--json").json["nodes"]
    assert drained["standing"] == "draining"
    assert run("drain", "alpha", "--deadline", "1h", "--wait", "--timeout", "0.3").code == 124
    assert run("uncordon", "alpha").out == "alpha  alive\n"
    assert run(*asked).out == "it would start now on alpha\n"
    assert run(*asked, "--json").json["verdict"] == "now"
    assert run("drain", "omega").err.startswith("fray: no machine is called 'omega'")
    assert run("show", "lab/parent", "--json").json["state"] == "running"


@pytest.mark.promise("P10")
def test_events_and_explain_show_what_happened_and_why(run: Fray, jobs: dict[str, str]) -> None:
    whats = [event["what"] for event in run("events", "lab/broken", "--json").json]
    assert whats[0] == "launched"
    assert "running" in whats
    assert run("events", "lab/broken").out.splitlines()[0].split()[1] == "launched"
    assert "10000" in run("explain", "lab/huge").out
    assert run("explain", "lab/huge", "--json").json["state"] == "pending"


def test_events_of_all_jobs_are_found_by_machine_user_and_time(run: Fray, jobs: dict[str, str]) -> None:
    found = run("events", "--node", "alpha", "--json").json
    assert found[0]["what"] == "node joined"
    assert {"placed", "node joined"} <= {event["what"] for event in found}
    lines = run("events", "--node", "alpha").out.splitlines()
    assert "node joined" in lines[0]
    assert run("events", "--user", "nemo", "--json").json == []
    assert len(run("events", "--limit", "2", "--json").json) == 2
    assert (
        run("events", "--job", "lab/broken", "--node", "alpha", "--since", "1h", "--json").json[0]["what"] == "placed"
    )
    assert "the job is named already" in run("events", "lab/broken", "--user", "ada").err
    assert run("events", "--since", "soon").code == 2


def test_what_jobs_held_is_summed_by_what_is_asked_for(run: Fray, jobs: dict[str, str]) -> None:
    by_job = {each["key"]: each for each in run("history", "--by", "job", "--json").json}
    assert by_job[jobs["lab/broken"]]["attempts"] == len(run("show", "lab/broken", "--json").json["attempts"])
    held = sum(each["held"]["cpu"] for each in by_job.values())
    (machine,) = run("history", "--by", "machine", "--json").json
    assert machine["key"] == "cpu"
    assert machine["held"]["cpu"] >= held > 0
    assert run("history", "--namespace", "nowhere").out == "nothing ran in that time\n"
    assert run("history").out.split()[:3] == ["USER", "JOBS", "ATTEMPTS"]
    assert "since_s=3600 must be more than until_s=7200" in run("history", "--since", "1h", "--until", "2h").err
    assert "has no prices: an operator writes them below [prices]" in run("cost").err


def test_sql_gives_what_the_other_verbs_show(run: Fray, jobs: dict[str, str]) -> None:
    def rows(query: str, *options: str) -> Any:
        return run("sql", query, "--json", *options).json

    listed = {info["job_id"]: info["state"] for info in run("jobs", "--json").json}
    assert {row["job_id"]: row["state"] for row in rows("select job_id, state from jobs")} == listed
    failed = rows(f"select cause, user, node from attempts where job_id = '{jobs['lab/broken']}'")
    (shown,) = run("history", "--job", jobs["lab/broken"], "--json").json
    assert failed == [{"cause": "failure", "user": shown["key"], "node": "alpha"}]
    assert rows("select node, state from nodes") == [{"node": "alpha", "state": "alive"}]
    assert rows("select count(*) as n from events where what = 'node joined'") == [{"n": 1}]
    before = sum(each["held"]["cpu"] for each in run("history", "--since", "30d", "--json").json)
    (used,) = rows("select sum(cpu_hours) as hours from usage")
    assert used["hours"] >= before > 0
    assert run("sql", "select what from events", "--limit", "1").err == (
        "fray: only the first 1 rows are shown; --limit 0 has all\n"
    )
    assert run("sql", "delete from jobs").err.startswith("fray: a query may only read: write SELECT")
    assert run("sql", "select nothing from jobs").code == 2
    assert "no query given" in run("sql").err
    assert run("sql", "--tables").out.startswith("jobs (job_id, name, ")


def test_a_machine_is_let_in_by_a_token_that_is_printed(run: Fray) -> None:
    assert run("token", "--for-machine", "v5e-9").out.startswith("join:v5e-9:1:")
    token = run("token", "--for-machine", "v5e-9", "--hosts", "4", "--life-s", "60", "--json").json
    assert (token["machine"], token["token"].split(":")[2]) == ("v5e-9", "4")
    refused = run("token", "--for-machine", "v5e-9", "--hosts", "0")
    assert (refused.code, "0 hosts must be 1 to" in refused.err) == (2, True)


def test_machines_and_actors_are_listed(run: Fray, lab: Lab, jobs: dict[str, str]) -> None:
    assert "alpha" in run("nodes").out
    (node,) = run("nodes", "--json").json
    assert (node["name"], node["alive"]) == ("alpha", True)
    shown = run("node", "show", "alpha").out
    assert "lab/parent" in shown
    assert "memory free" in shown
    assert run("node", "show", "omega").err == "fray: no machine named 'omega'; known machines: alpha\n"

    async def within() -> None:
        async with fray.open_cluster(lab.spec, token=TOKEN, namespace="acting", logs=False) as cluster:
            counter = await cluster.create_actor(job_functions.Counter, 1, name="counter")
            await counter.add(1)
            done.append(await trio.to_thread.run_sync(run, "actors", "--namespace", "acting"))

    done: list[Said] = []
    trio.run(within)
    lines = done[0].out.splitlines()
    assert lines[1].split()[:3] == ["counter", "ready", "alpha"]


def test_an_actor_is_called_with_json_and_its_stacks_are_shown(run: Fray, lab: Lab) -> None:
    def look() -> None:
        (info,) = run("actor", "ls", "--namespace", "called", "--json").json
        assert run("actor", "call", "called-counter", "add", "41").json == 42
        assert run("actor", "call", info["actor_id"], "add", "--keywords", '{"k": 3}', "--timeout", "60").json == 45
        said = run("actor", "call", "called-counter", "add", "two")
        assert (said.code, said.err.partition(" (")[0]) == (2, "fray: argument 'two' is not JSON")
        said = run("actor", "call", "called-counter", "subtract")
        assert said.code == 1
        assert "subtract" in said.err
        said = run("actor", "call", "called", "add")
        assert (said.code, said.err) == (
            1,
            "fray: no living actor with the id or name 'called'; `fray actor ls` lists all\n",
        )
        (text,) = run("actor", "stack", "called-counter", "--json").json.values()
        assert "job_functions.py" in text or "Thread" in text

    async def within() -> None:
        async with fray.open_cluster(lab.spec, token=TOKEN, namespace="called", logs=False) as cluster:
            counter = await cluster.create_actor(job_functions.Counter, 1, name="called-counter")
            assert await counter.add(0) == 1
            await trio.to_thread.run_sync(look)

    trio.run(within)


@pytest.mark.skipif(not find_py_spy(), reason="py-spy is not installed: pip install 'fray[stacks]'")
def test_py_spy_records_a_job_with_its_native_frames(run: Fray, jobs: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "native.json"
    said = run("profile", "lab/parent", "--native", "--seconds", "2", "--output", str(file), "--json")
    if "lets it read no other process" in said.err:
        pytest.skip("ptrace is refused on this machine")
    assert said.code == 0, said.err
    assert said.json["file"] == str(file)
    document = json.loads(file.read_text())
    assert document["name"] == jobs["lab/parent"]
    assert sum(len(each["samples"]) for each in document["profiles"]) == said.json["samples"] > 10
    # What a loop of Trio waits in is C; its caller is Python.
    frames = document["shared"]["frames"]
    assert any("epoll" in frame["name"] and not frame["file"].endswith(".py") for frame in frames), frames
    assert any(frame["file"].endswith("_run.py") for frame in frames), frames
    assert file.read_text() not in run("audit", "--json").out
    program = run(*DETACHED, "no-python", "--", "sleep", "1000").out.strip()
    wait_for_attempt(run, program, 0)
    refused = run("profile", program, "--native", "--seconds", "1")
    assert refused.code == 2
    assert refused.err.startswith(f"fray: py-spy has recorded nothing of {program}: ")
    run("stop", program)


def test_a_job_is_profiled_into_a_file_of_speedscope(run: Fray, jobs: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    said = run("profile", "lab/parent", "--seconds", "1", "--output", str(file), "--json")
    assert said.code == 0, said.err
    assert said.json["file"] == str(file)
    document = json.loads(file.read_text())
    assert document["name"] == jobs["lab/parent"]
    assert document["profiles"]
    assert "hold_child" in [frame["name"] for frame in document["shared"]["frames"]]
    assert run("profile", "lab/broken").code == 2


def test_a_report_has_what_is_known_of_a_job_and_no_secrets(
    run: Fray, jobs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def contents(job_id: str) -> dict[str, str]:
        said = run("report", job_id)
        assert said.code == 0, said.err
        path = tmp_path / f"{job_id.replace('/', '-')}.tar.gz"
        assert path.stat().st_mode & 0o777 == 0o600
        found = {}
        with tarfile.open(path) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                found[member.name.partition("/")[2]] = file.read().decode()
        return found

    broken = contents(jobs["lab/broken"])
    assert broken.keys() == {
        *("job.json", "job.txt", "events.txt", "explain.txt", "attempts.json", "machines.json", "log.txt"),
        *("versions.json", "request.json"),
    }
    assert json.loads(broken["job.json"])["job_id"] == jobs["lab/broken"]
    assert "no luck" in broken["job.txt"]
    assert "launched" in broken["events.txt"]
    assert simulate(["--report", f"{jobs['lab/broken'].replace('/', '-')}.tar.gz"]) == 0
    assert [node["name"] for node in json.loads(broken["machines.json"])["nodes"]] == ["alpha"]
    assert "hold_child" in contents(jobs["lab/parent"])["stacks.txt"]
    script = 'echo "the key is $KEY"; sleep 1000'
    monkeypatch.setenv("KEY", "open sesame")
    (job_id,) = run(*DETACHED, "talker", "--env", "KEY", "--", "sh", "-c", script).out.split()
    wait_until(lambda: run("logs", job_id).out)
    found = contents(job_id)
    # Variables are in no record; what a job prints is in its log.
    assert "the key is open sesame" in found.pop("log.txt")
    assert "open sesame" not in "".join(found.values())
    assert TOKEN not in "".join(found.values())
    run("stop", job_id)


def test_a_machine_says_what_is_in_force_there_and_who_has_which_device(
    run: Fray, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAY_TEST_DEVICES", str(tmp_path))
    files = [tmp_path / "nvidia0", tmp_path / "nvidia1"]
    for file in files:
        file.touch()
    config = tmp_path / "beta.toml"
    config.write_text('gpus = ["a100", "a100"]\n')
    lab.start(
        "beta",
        "tests.processes.gpu_node",
        "--controller",
        lab.spec,
        "--name",
        "beta",
        "--config",
        str(config),
        "--state-dir",
        str(tmp_path / "state"),
    )
    given, freed = (
        run(
            "run", "--detach", "--name", name, "--gpu", "1", "--cpu", "0.1", "--memory", "50MB", "--", "sleep", "1000"
        ).out[:-1]
        for name in ("given", "freed")
    )
    wait_until(lambda: run("show", "--json", "freed").json["state"] == "running")
    stranger = subprocess.Popen(["sleep", "1000"], stdin=files[1].open("rb"))
    try:
        assert run("stop", "freed").code == 0
        node = wait_until(lambda: described(run, "beta"))
        assert node["granted"] == {"gpu-0": f"{given}:0:0"}, freed
        assert node["busy"] == {"gpu-1": f"held by pid {stranger.pid} (sleep)"}
        shown = run("node", "show", "beta").out
        assert re.search(rf"^gpu-0 +used +{given}:0:0$", shown, re.MULTILINE)
        assert re.search(rf"^gpu-1 +withheld +held by pid {stranger.pid} \(sleep\)$", shown, re.MULTILINE)
        words = dict(re.split("  +", line, maxsplit=1) for line in shown.splitlines() if re.search(r"\S  +\S", line))
        assert words["devices free"] == "0 of 2; 1 withheld, see below"
        assert "PID namespace" in words["isolation"]
        assert words["memory limit"].startswith("by ")
        assert words["logs"].startswith("kept for 7 days after an attempt's end")
        assert words["zygotes"] == "its own"
        assert words["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
        assert "0 of 2; 1 withheld" in run("nodes").out
    finally:
        stranger.kill()
        stranger.wait()
    wait_until(lambda: not described(run, "beta")["busy"])
    assert re.search(r"^gpu-1 +free$", run("node", "show", "beta").out, re.MULTILINE)
    run("stop", "given")
    lab.kill("beta", signal.SIGTERM)


def described(run: Fray, name: str) -> Any:
    """Return a machine as in JSON, once it has reported itself."""
    return next((node for node in run("nodes", "--json").json if node["name"] == name and node["details"]), None)


def wait_until(found: Callable[[], Any]) -> Any:
    """The first true answer."""
    give_up_at = time.monotonic() + 20
    while not (answer := found()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    return answer


def test_stacks_of_a_running_job_are_shown_and_of_others_refused(run: Fray, jobs: dict[str, str]) -> None:
    said = run("stacks", "lab/parent")
    assert said.code == 0
    assert f"== {jobs['lab/parent']}:0:0" in said.out
    refused = run("stacks", "lab/broken")
    assert (refused.code, refused.out) == (2, "")
    assert "only running jobs have stacks" in refused.err


def test_logs_are_read_from_either_end_and_followed_to_the_end(run: Fray, lab: Lab) -> None:
    script = "for n in 1 2 3 4; do echo line $n; done; echo trouble >&2; sleep 1; echo last"
    run("run", "--detach", "--name", "teller", "--cpu", "0.1", "--memory", "50MB", "--", "sh", "-c", script)
    followed = run("logs", "-f", "teller")
    assert followed.out.splitlines() == ["line 1", "line 2", "line 3", "line 4", "last"]
    assert "trouble" in followed.err.splitlines()
    assert run("logs", "--tail", "1", "teller").out == "last\n"
    assert run("logs", "--grep", "3", "teller").out == "line 3\n"
    assert run("logs", "--stream", "err", "teller") == Said(0, "", "trouble\n")
    assert run("logs", "--since", "1h", "--tree", "teller").out.splitlines()[0] == "(teller) line 1"
    lines = [json.loads(line) for line in run("logs", "--stream", "out", "--json", "teller").out.splitlines()]
    assert [line["text"] for line in lines] == followed.out.splitlines()
    assert {"time", "stream", "attempt_id", "job_id", "name", "number", "kind", "lost", "until"} <= lines[0].keys()
    assert run("logs", "--since", "soon", "teller").err == (
        "fray: --since 'soon' is not a valid duration; examples: 30s, 10m, 2h, 1d\n"
    )
    assert "--tail -1" not in run("logs", "--tail", "-1", "teller").out


# Names ---------------------------------------------------------------------------------------------------------------


def test_a_job_is_found_by_its_id_or_its_whole_name(run: Fray, jobs: dict[str, str]) -> None:
    for word in (jobs["lab/parent"], "lab/parent"):
        assert run("explain", word, "--json").json["job_id"] == jobs["lab/parent"], word
    for verb in ("explain", "show", "events", "logs", "stacks", "wait", "stop"):
        for word in ("lab/par", jobs["lab/parent"][:-3], "lab/"):
            said = run(verb, word)
            assert (said.code, said.out) == (1, ""), (verb, word)
            assert said.err.startswith(f"fray: no job with the id or name {word!r}; these begin with it:\n")
            assert f"  {jobs['lab/parent']}  (lab/parent, running, namespace lab)\n" in said.err
    none = run("explain", "nothing-of-that-name")
    assert (none.code, none.out) == (1, "")
    assert none.err == "fray: no job with the id or name 'nothing-of-that-name'; `fray jobs` lists all\n"


def test_of_jobs_of_one_name_the_living_one_counts_and_else_the_newest(run: Fray) -> None:
    ended = []
    for _ in range(2):
        ended += run(*DETACHED, "twin", "--", "true").out.split()
        assert run("wait", ended[-1]).code == 0
    assert run("show", "twin", "--json").json["job_id"] == ended[-1] != ended[0]
    (living,) = run(*DETACHED, "twin", "--", "sleep", "1000").out.split()
    assert run("show", "twin", "--json").json["job_id"] == living
    (other,) = run(*DETACHED, "twin", "--namespace", "elsewhere", "--", "sleep", "1000").out.split()
    assert run("show", other, "--json").json["namespace"] == "elsewhere"
    several = run("stop", "twin")
    assert (several.code, several.out) == (2, "")
    assert several.err.startswith("fray: 'twin' is the name of 2 living jobs: write an id, or --namespace\n")
    assert living in several.err
    assert ended[0] not in several.err, "it has ended"
    assert run("stop", "twin", "--namespace", "elsewhere").out == f"{other}: stopped\n"
    assert run("stop", "twin").out == f"{living}: stopped\n"


@pytest.mark.parametrize("answer", ["n", "y"])
def test_a_terminal_is_asked_before_several_jobs_are_stopped(run: Fray, answer: str) -> None:
    for name in ("asked/one", "asked/two"):
        run(*DETACHED, name, "--", "sleep", "1000")
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "fray.cli", "stop", "--prefix", "asked/"]
    process = subprocess.Popen(command, stdin=inside, stderr=inside, stdout=subprocess.PIPE, text=True)
    os.close(inside)
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(terminal, 4096)
    assert b"these 2 jobs, and all below them, would be stopped:\r\n  asked/one-" in shown
    os.write(terminal, f"{answer}\n".encode())
    out, _ = process.communicate(timeout=30)
    os.close(terminal)
    assert (process.returncode, out.count(": stopped\n")) == ((0, 2) if answer == "y" else (1, 0))
    assert len(run("jobs", "--prefix", "asked/", "--state", "running", "--state", "pending", "--json").json) == (
        0 if answer == "y" else 2
    )
    run("stop", "--prefix", "asked/", "--yes")


def test_a_list_is_watched_on_a_terminal_until_ctrl_c(run: Fray) -> None:
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "fray.cli", "jobs", "--watch", "--prefix", "watched/", "--limit", "1"]
    environ = {**os.environ, "COLUMNS": "60", "TERM": "xterm", "NO_COLOR": ""}
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environ)
    os.close(inside)

    def read_until(screen: str) -> None:
        """Read until a screen is shown that begins like this."""
        shown = b""
        while not re.search(rb"\x1b\[H\x1b\[2J" + screen.encode(), shown, re.DOTALL):
            there, _, _ = select.select([terminal], [], [], 60)
            assert there, shown
            shown += os.read(terminal, 4096)
        assert b"Traceback" not in shown

    try:
        read_until("NAME")
        (job_id,) = run(*DETACHED, "watched/one", "--", "sleep", "1000").out.split()
        note = "fray: only the newest 1 are shown"
        read_until(rf"[^\x1b]+\x1b\[32mrunning\x1b\[0m[^\x1b]* {job_id}\s+{note}")
        assert run("stop", "watched/one").code == 0
        read_until(rf"[^\x1b]+stopped [^\x1b]* {job_id}")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_top_is_shown_once_without_a_terminal(run: Fray, jobs: dict[str, str]) -> None:
    said = run("top", "--sort", "id")
    assert said.code == 0
    assert "machines: 1 alive" in said.out
    assert re.search(rf"^{jobs['lab/parent']} .* alpha ", said.out, re.MULTILINE)
    found = run("top", "--json").json
    assert jobs["lab/parent"] in [job["job_id"] for job in found["jobs"]]
    assert found["usage"]["capacity"]["cpu"] > 0


@pytest.mark.parametrize(("end", "code"), [("q", 0), ("\x03", 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_top_takes_the_terminal_and_restores_it(
    run: Fray, jobs: dict[str, str], end: str | signal.Signals, code: int
) -> None:
    terminal, inside = pty.openpty()
    modes = termios.tcgetattr(inside)
    environ = {**os.environ, "COLUMNS": "100", "LINES": "30", "TERM": "xterm", "NO_COLOR": "1"}
    # In a session of its own with this terminal, whose Ctrl-C is then its signal.
    command = ["setsid", "--ctty", sys.executable, "-m", "fray.cli", "top"]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, env=environ)
    shown = b""

    def read_until(text: str) -> None:
        nonlocal shown
        while text.encode() not in shown:
            there, _, _ = select.select([terminal], [], [], 60)
            assert there, shown
            shown += os.read(terminal, 4096)

    try:
        read_until(jobs["lab/parent"])
        assert b"\x1b[?1049h" in shown
        os.write(terminal, b"/no-such-job\r")
        read_until("0 shown by cpu, with 'no-such-job'")
        if isinstance(end, str):
            os.write(terminal, end.encode())
        else:
            process.send_signal(end)
        read_until("\x1b[?1049l")
        assert process.wait(timeout=30) == code
        assert termios.tcgetattr(inside) == modes
        assert b"Traceback" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(inside)
        os.close(terminal)


def test_jobs_are_filtered_by_user_machine_time_and_failure(run: Fray, jobs: dict[str, str]) -> None:
    def names(*options: str) -> list[str]:
        return sorted(info["name"] for info in run("jobs", "--namespace", "lab", *options, "--json").json)

    user = run("show", "lab/parent", "--json").json["user"]
    every = ["child", "lab/broken", "lab/huge", "lab/parent"]
    assert names("--user", user) == names("--since", "1h") == every
    assert names("--user", "another-user") == names("--until", "1h") == []
    assert names("--node", "alpha") == ["child", "lab/broken", "lab/parent"]
    assert names("--failed") == ["lab/broken"]
    assert names("--user", user, "--limit", "1") == [run("jobs", "--namespace", "lab", "--json").json[-1]["name"]], (
        "the newest"
    )
    wrong = run("jobs", "--since", "1h", "--until", "2h")
    assert (wrong.code, wrong.err) == (2, "fray: --until 2h is not later than --since 1h: no job can fit\n")


def test_common_options_may_be_written_before_the_verb(lab: Lab, run: Fray, jobs: dict[str, str]) -> None:
    listed = run("jobs", "--json", "--namespace", "lab").json
    assert run("--json", "--namespace", "lab", "jobs").json == listed
    assert run("--cluster", lab.spec, "jobs", "--namespace", "lab", "--json").json == listed
    assert run("--cluster", "local", "jobs", "--cluster", lab.spec).code == 0, "the one after the verb counts"
    assert "exists only within its driver" in run("--cluster", "local", "jobs").err


@pytest.mark.parametrize("program", ["fray.cli", "fray.controller.main", "fray.node"])
def test_each_program_prints_its_version(program: str) -> None:
    said = subprocess.run([sys.executable, "-m", program, "--version"], capture_output=True, text=True, timeout=60)
    name = {"fray.cli": "fray", "fray.controller.main": "fray-controller", "fray.node": "fray-node"}[program]
    assert (said.returncode, said.stdout) == (0, f"{name} {fray.__version__}\n")


# Launching, waiting, ending ------------------------------------------------------------------------------------------


def test_run_shows_what_the_program_prints_on_its_streams_and_returns_its_exit_code(run: Fray) -> None:
    script = "echo hello $WHO; echo trouble >&2; exit 3"
    said = run(
        "run", "--name", "sh", "--cpu", "0.1", "--memory", "50MB", "--env", "WHO=world", "--", "sh", "-c", script
    )
    assert said.code == 3
    assert said.out == "hello world\n"
    trouble, ending = said.err.splitlines()
    assert trouble == "trouble"
    assert ending.startswith("fray: sh-")
    assert ending.endswith(" failed: ended with exit code 3")
    assert run("run", "--cpu", "0.1", "--memory", "50MB", "--", "true") == Said(0, "", "")


def test_a_program_that_waits_for_room_says_for_what(run: Fray, lab: Lab) -> None:
    process = command(lab, "run", "--name", "large", "--cpu", "5000", "--", "true")
    assert process.stderr is not None
    warning, reason = process.stderr.readline(), process.stderr.readline()
    assert re.match(r"fray: warning: job 'large' fits no machine of this cluster", warning), warning
    assert re.match(r"fray: large-\w+ waits: needs 5000 CPUs", reason), reason
    job = reason.split()[1]
    assert run("logs", job).err == f"fray: {job} has not been started yet; `fray explain {job}` says why\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)


def test_an_empty_log_is_reported(run: Fray, jobs: dict[str, str]) -> None:
    job = jobs["lab/broken"]
    said = run("logs", job, "--attempt", "7")
    assert (said.code, said.out) == (0, "")
    assert said.err == f"fray: no output of {job} matches these options; it has 1 attempt\n"


def test_files_are_sent_along_and_only_the_programs_own_lines_are_its_output(run: Fray, tmp_path: Path) -> None:
    (tmp_path / "hello.txt").write_text("from the workspace\n")
    words = ("run", "--name", "there", "--cpu", "0.1", "--memory", "50MB", "--workspace", str(tmp_path), "--")
    said = run(*words, "cat", "hello.txt")
    assert (said.code, said.out) == (0, "from the workspace\n")
    assert run("logs", "there").out == "from the workspace\n"


def test_every_field_of_a_request_that_concerns_programs_has_its_option() -> None:
    words = (
        "--name a --cpu 2 --pin-cpus --memory 1GB --disk 2GB --gpu h100:8 --replicas 3 --region eu --zone eu-a "
        "--zone eu-b --workspace . --pip polars --extra gpu --env A=1 --secret B=C --port grpc --max-retries 3 "
        "--max-retries-preemption 4 --max-retries-machine-loss 5 --max-retries-out-of-memory 6 --exit-code 75=retry "
        "--exit-code 2=fail --backoff-s 1.5 --backoff-max-s 60 --health /healthz --health-period-s 2 --stall-s 300 "
        "--on-stall restart --term-s 30 --priority batch --time-limit 2h --wait-limit 1h --no-preemptible "
        "--notice-s 20 --detach -- python train.py --lr 1"
    )
    request = request_of(parser_of().parse_args(["run", *words.split()]))
    blank = request_of(parser_of().parse_args(["run", "--name", "b", "--", "true"]))
    names = [field.name for field in attrs.fields(JobRequest)]
    same = {name for name in names if getattr(request, name) == getattr(blank, name)}
    # Of resources; no result; of groups; of services that launch for their users.
    assert same == {"replicas", "result_storage", "role", "on_behalf_of"}
    assert blank == JobRequest(name="b", entrypoint=Entrypoint.from_binary("true"))
    assert request.ports == ("grpc", "http")
    assert request.health == HealthCheck(path="/healthz", period_s=2)
    assert request.exit_codes == {75: "retry", 2: "fail"}
    found = request.resources
    assert (found.regions, found.zones, found.pin_cpus) == (("eu",), ("eu-a", "eu-b"), True)
    assert request.entrypoint == Entrypoint.from_binary("python", ["train.py", "--lr", "1"])


def test_a_program_begins_again_as_its_options_say(run: Fray, tmp_path: Path) -> None:
    script = f"echo run; test -e {tmp_path}/been && exit 4; touch {tmp_path}/been; exit 75"
    rules = ("--exit-code", "75=retry", "--exit-code", "4=ignore", "--max-retries", "5")
    said = run("run", "--cpu", "0.1", *rules, "--name", "again", "--", "sh", "-c", script)
    assert (said.code, said.out) == (0, "run\nrun\n")
    assert run("show", "again", "--json").json["retries"] == {"failure": 1}


def test_a_detached_program_is_waited_for_and_stopped_by_other_commands(run: Fray) -> None:
    (job_id,) = run(*DETACHED, "night/one", "--", "sleep", "1000").out.split()
    run(*DETACHED, "night/two", "--", "sleep", "1000")
    late = run("wait", "night/one", "--timeout", "0.2")
    assert late.code == 124
    assert "1 of 1 jobs have not ended after 0.2 s" in late.err
    info = run("show", "--json", "night/one").json
    assert (info["namespace"], info["owner"]) == ("night/one", "")
    stopped = run("stop", "--prefix", "night/", "--reason", "morning")
    assert stopped.code == 0
    assert sorted(line.split(": ")[1] for line in stopped.out.splitlines()) == ["stopped", "stopped"]
    assert "`fray stop` by" in (why := run("show", "--json", job_id).json["error_message"])
    assert why.endswith(": morning")
    assert run("wait", job_id).code == 1
    assert run("stop", "--prefix", "night/").err == "fray: no living job has the prefix 'night/'\n"
    assert run("stop").code == 2
    assert run("stop", "--prefix", "").code == 2


def test_a_requeued_job_runs_again_and_says_who_requeued_it(run: Fray) -> None:
    (job_id,) = run(*DETACHED, "back/one", "--", "sleep", "1000").out.split()
    wait_for_attempt(run, job_id, 0)
    assert run("requeue", "back").code == 1  # a beginning is not taken for a name
    requeued = run("requeue", "back/one", "--reason", "room for the demo")
    assert (requeued.code, requeued.out) == (0, f"{job_id}: requeued\n")
    wait_for_attempt(run, job_id, 1)
    assert run("show", job_id, "--json").json["retries"] == {"requeue": 1}
    said = run("explain", job_id).out
    assert "requeues: 1, the last one: `fray requeue` by " in said
    assert ": room for the demo (by " in said
    (requeue,) = (event for event in run("events", job_id, "--json").json if event["what"] == "requeued")
    assert requeue["text"].startswith("`fray requeue` by ")
    assert run("requeue", "--prefix", "back/", "--json").json == {"jobs": [job_id], "refused": {}}
    wait_for_attempt(run, job_id, 2)
    run("stop", job_id)
    assert run("requeue", "--prefix", "back/").err == "fray: no running job has the prefix 'back/'\n"
    refused = run("requeue", job_id)
    assert (refused.code, refused.err) == (
        1,
        f"fray: {job_id} was not requeued: it is stopped, and only what runs can be requeued\n",
    )
    assert "requeue" in run("audit").out


def wait_for_attempt(run: Fray, job_id: str, number: int) -> None:
    end = time.monotonic() + 60
    while True:
        found = run("show", job_id, "--json").json
        if found["state"] == "running" and found["attempts"][-1]["attempt_id"].endswith(f":{number}:0"):
            return
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_jobs_of_a_prefix_are_waited_for_together(run: Fray) -> None:
    for name in ("dawn/one", "dawn/two", "dusk"):
        run(*DETACHED, name, "--", "sleep", "1000")
    late = run("wait", "--prefix", "dawn/", "--timeout", "0.2")
    assert (late.code, "2 of 2 jobs have not ended" in late.err) == (124, True)
    assert "exclude each other" in run("wait", "dusk", "--prefix", "du").err
    assert "that would wait for everything" in run("wait", "--prefix", "").err
    run("stop", "--prefix", "d")
    said = run("wait", "--prefix", "dawn/")
    assert (said.code, said.err) == (1, "fray: no living job has the prefix 'dawn/'\n")


def test_wait_returns_the_exit_code_of_the_first_that_failed(run: Fray) -> None:
    run(*DETACHED, "good", "--", "true")
    run(*DETACHED, "bad", "--", "sh", "-c", "exit 7")
    said = run("wait", "good", "bad")
    assert said.code == 7
    assert [line.split(": ")[1] for line in said.out.splitlines()] == ["succeeded", "failed"]


def test_a_port_of_a_job_is_a_port_here_until_the_job_ends(lab: Lab, run: Fray, tmp_path: Path) -> None:
    (tmp_path / "hello.txt").write_text("over there")
    serve = "exec python3 -m http.server --bind 127.0.0.1 $FRAY_PORT_HTTP --directory " + str(tmp_path)
    run(
        "run",
        "--detach",
        "--name",
        "serve",
        "--cpu",
        "0.1",
        "--memory",
        "50MB",
        "--port",
        "http",
        "--",
        "sh",
        "-c",
        serve,
    )
    process = command(lab, "forward", "serve", "http")
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert fetched(f"http://{address}/hello.txt") == "over there"
    assert f"http {run('show', '--json', 'serve').json['attempts'][0]['host']}" in run("show", "serve").out
    assert run("stop", "serve").code == 0
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err.split()[0], err.split()[2]) == (1, "fray:", "stopped")
    assert run("forward", "serve", "grpc").code in (1, 2)


def fetched(url: str) -> str:
    """Return the nodes, as soon as the server runs."""
    give_up_at = time.monotonic() + 20
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        except OSError:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)


# What is wrong -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "the following arguments are required: VERB"),
        (["jobs", "--state", "odd"], 2, "invalid choice: 'odd'"),
        (["jobs", "--cluster", "local"], 2, "a 'local' cluster exists only within its driver"),
        (["jobs", "--cluster", "ray://x"], 2, "invalid cluster spec 'ray://x'"),
        (["jobs", "--cluster", "fray://127.0.0.1:1"], 1, "no controller listens at 127.0.0.1:1"),
        (["jobs", "--token-file", "/nonexistent/token"], 2, "the token file /nonexistent/token cannot be read"),
        (["run", "--gpu", "many", "--", "true"], 2, "--gpu 'many'; expected a number, or a type and a number"),
        (["run", "--env", "NOT_SET_HERE", "--", "true"], 2, "write --env NOT_SET_HERE=VALUE"),
        (["run", "--env", "a-b=1", "--", "true"], 2, "not a valid variable name"),
        (["run", "--name", "no blanks", "--", "true"], 2, "cannot be the name of a job"),
        (["run", "--memory", "much", "--", "true"], 2, "much"),
        (["run", "--exit-code", "75", "--", "true"], 2, "--exit-code '75'; expected a code from 1 to 255 and retry"),
        (["run", "--exit-code", "2=fail", "--exit-code", "2=retry", "--", "true"], 2, "--exit-code 2 is given twice"),
        (["run", "--max-retries", "-2", "--", "true"], 2, "must be 0 or more, or -1 for any number"),
        (["run", "--health", "healthz", "--", "true"], 2, "must begin with a slash"),
        (["run", "--stall-s", "0", "--", "true"], 2, "must be more than 0 seconds"),
        (["run", "--term-s", "-1", "--", "true"], 2, "SIGKILL must be reached"),
        (["run", "--prority", "batch", "--", "true"], 2, "unknown option '--prority'; did you mean --priority"),
        (["run", "--priority", "urgent", "--", "true"], 2, "invalid choice: 'urgent'"),
        (["run", "--time-limit", "5 parsecs", "--", "true"], 2, "--time-limit '5 parsecs' is not a valid duration"),
        (["jobs", "train"], 2, "unknown argument 'train'; see fray jobs --help"),
        (["run"], 2, "COMMAND"),
        (["wait"], 2, "no jobs given"),
    ],
)
def test_mistakes_are_reported_in_one_line(run: Fray, words: list[str], code: int, message: str) -> None:
    said = run(*words)
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith("fray")
    assert message in said.err
    assert said.err.count("\n") == 1


def test_a_wrong_token_gets_nothing(run: Fray, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FRAY_TOKEN", "wrong")
    assert run("jobs").code == 1
    monkeypatch.delenv("FRAY_TOKEN")
    assert "FRAY_TOKEN" in run("jobs").err
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert run("jobs", "--token-file", str(tmp_path / "token")).code == 0


# The page ------------------------------------------------------------------------------------------------------------


def test_every_example_of_the_page_does_what_it_says(
    run: Fray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fray-state").mkdir()
    Path("fray-state/token").write_text(TOKEN)
    assert run("ca", "init", "--store", "./fray-state").code == 0
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    examples = [line for block in blocks for line in block.splitlines()]
    assert len(examples) > 10
    for line in examples:
        program, *words = shlex.split(line, comments=True)
        assert program == "fray"
        # One reads an invitation, and its example names a cluster of a lab; the other needs it: see test_login_real.py.
        if words[0] in ("login", "logout"):
            continue
        said = run(*words)
        assert said.code == 0, f"{line}: {said}"
    assert run("show", "train").out.count("wrong learning rate") >= 1


def test_the_command_is_installed_and_every_verb_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'fray = "fray.cli.main:main"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert main(["--help"]) == 0
    verbs = re.findall(r"^    ([a-z]+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"jobs", "show", "events", "explain", "stop", "wait", "run", "stacks", "nodes", "actors"} <= set(verbs)
    for verb in verbs:
        assert main([verb, "--help"]) == 0
        said = capsys.readouterr().out
        # A group of verbs lists them.
        for words in [[verb, below] for below in re.findall(r"^    ([a-z-]+)", said, re.MULTILINE)]:
            assert main([*words, "--help"]) == 0
            assert "examples:\n  fray " in capsys.readouterr().out, words
        assert "examples:\n  fray " in said or "  VERB\n" in said or "  ACTION\n" in said, verb


def test_help_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys; from fray.cli.main import main; main(['run', '--help']); "
        "sys.exit(' '.join({'trio', 'attrs', 'fray.api.cluster', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "\n"), "sys.exit('') says nothing, with code 1"


# As a process --------------------------------------------------------------------------------------------------------


def command(lab: Lab, *words: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fray.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=lab.environ(PYTHONUNBUFFERED="1"),
        **options,
    )


def begun(process: subprocess.Popen[str]) -> None:
    """Wait until its job has said so."""
    assert process.stdout is not None
    there, _, _ = select.select([process.stdout], [], [], 60)
    if not there:
        process.kill()
        pytest.fail(f"the job has said nothing: {process.communicate()}")
    assert process.stdout.readline() == "begun\n"


def test_ctrl_c_ends_the_job_with_one_message(lab: Lab, run: Fray) -> None:
    words = ("run", "--name", "interrupted", "--cpu", "0.1", "--memory", "50MB", "--")
    process = command(lab, *words, "sh", "-c", "echo begun; sleep 1000")
    begun(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    ending, ended = err.splitlines()
    assert ending.startswith("fray: stopping interrupted-")
    assert "stopped" in ended
    assert out == ""
    assert process.returncode in (1, 128 + signal.SIGTERM)
    assert run("show", "--json", "interrupted").json["state"] == "stopped"


def test_ctrl_c_before_there_is_a_job_leaves_at_once_and_quietly(lab: Lab, run: Fray) -> None:
    """Send signals from the start: the job's first line may be on the terminal before the answer to its launch."""
    lab.running["controller"].send_signal(signal.SIGSTOP)
    try:
        process = command(lab, "run", "--name", "too-early", "--cpu", "0.1", "--memory", "50MB", "--", "true")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.send_signal(signal.SIGINT)
        assert (*process.communicate(timeout=20), process.returncode) == ("", "", 130)
    finally:
        lab.running["controller"].send_signal(signal.SIGCONT)
    assert run("jobs", "--prefix", "too-early", "--json").json == []


def test_a_second_ctrl_c_leaves_at_once_and_the_cluster_ends_the_job(lab: Lab, run: Fray) -> None:
    words = ("run", "--name", "stubborn", "--cpu", "0.1", "--memory", "50MB", "--")
    process = command(lab, *words, "sh", "-c", "trap '' TERM INT; echo begun; while :; do sleep 1; done")
    assert process.stderr is not None
    begun(process)
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("fray: stopping stubborn-")
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert process.wait(5) == 130
    assert time.monotonic() - began < 2
    process.communicate()
    assert run("wait", "stubborn", "--timeout", "15").code == 1
    assert run("show", "--json", "stubborn").json["state"] == "stopped"


def test_a_reader_that_has_enough_ends_the_command_quietly(lab: Lab, jobs: dict[str, str]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        process = subprocess.run(
            [sys.executable, "-m", "fray.cli", "jobs"], stdout=closed, stderr=subprocess.PIPE, env=lab.environ()
        )
    assert (process.returncode, process.stderr) == (141, b"")


def test_job_groups_are_seen_and_ended(run: Fray, lab: Lab) -> None:
    async def launch() -> None:
        async with fray.open_cluster(lab.spec, token=TOKEN, logs=False) as cluster:
            requests = [
                JobRequest(
                    name=f"rl/{role.name}",
                    entrypoint=Entrypoint.from_callable(job_functions.hang),
                    resources=SMALL,
                    detached=True,
                    role=role,
                )
                for role in (JobRole("head"), JobRole("rollout", stage=1, auxiliary=True))
            ]
            await (await cluster.launch_group(requests, JobGroupConfig("rl"))).wait_running()

    trio.run(launch)
    shown = run("jobs", "--group", "rl")
    assert "GROUP" in shown.out
    assert "rl/head" in shown.out
    assert len(run("jobs", "--group", "rl", "--json").json) == 2
    (group,) = run("groups", "--json").json
    assert group["state"] == "running"
    assert re.search(r"rl/rollout +rollout +1 +auxiliary +running", run("groups", "rl").out)
    assert run("groups", "nothing").code == 1
    assert run("stop").code == 2
    assert "2 of 2 jobs have not ended" in run("wait", "--group", "rl", "--timeout", "0.2").err
    assert len(run("stop", "--group", "rl", "--json").json) == 2
    assert run("groups", "--json").json[0]["state"] == "stopped"
    assert "no living job group named 'rl'" in run("stop", "--group", "rl").err
    assert "no living job group named 'rl'" in run("wait", "--group", "rl").err


# Reservations ---------------------------------------------------------------------------------------------------------


def test_reservations_are_listed_shown_renewed_used_and_released(lab: Lab, run: Fray) -> None:
    async def reserve() -> str:
        async with fray.open_cluster(lab.spec, token=TOKEN, namespace="held", logs=False) as cluster:
            config = fray.ReservationConfig(SMALL, name="train", detached=True)
            reserved = await cluster.create_reservation(config)
            await (await cluster.follow_reservation(reserved)).wait_held(30)
            return reserved

    reserved = trio.run(reserve)
    (listed,) = run("reservations", "--json").json
    assert (listed["reservation_id"], listed["state"], len(listed["units"])) == (reserved, "held", 1)
    assert reserved in run("reservations").out
    shown = run("reservation", "show", reserved)
    assert "1 of 1, each 0.1 CPUs" in shown.out
    assert "held" in shown.out
    assert "expires in 2h00m" in run("reservation", "renew", reserved, "--ttl", "2h").out
    assert run("run", "--cpu", "0.1", "--memory", "50MB", "--reservation", reserved, "--", "true").code == 0
    assert "holds 1 of 1 units" in run("explain", reserved).out
    assert reserved in run("reservation", "show", "train").out, "by its name"
    assert run("reservation", "release", "train").code == 0
    assert run("reservations", "--json").json == []
    assert [info["state"] for info in run("reservations", "--ended", "--json").json] == ["ended"]
    assert "no reservation" in run("reservation", "show", "nothing").err
    assert "is not a valid duration" in run("reservation", "renew", reserved, "--ttl", "soon").err
    (gone,) = (one for one in run("reservations", "--all", "--json").json["gone"] if one["name"] == "train")
    assert (gone["reservation_id"], gone["nodes"], gone["units_given"]) == (reserved, ["alpha"], 1)
    # By its name, or once the cluster has forgotten it, it is the one on record.
    assert run("reservation", "show", "train", "--json").json == gone
    shown = run("reservation", "show", "train").out
    assert re.search(r"state +gone", shown)
    assert re.search(r"machines +alpha\n", shown)
    assert gone["ended_by"] in shown
    shown = run("reservations", "--all").out
    assert "HELD AFTER" in shown
    assert reserved in shown
    query = f"select nodes, held_at, ended_at, reason from reservations where reservation_id = '{reserved}'"
    (row,) = run("sql", query, "--json").json
    assert row == {"nodes": "alpha"} | {name: gone[name] for name in ("held_at", "ended_at", "reason")}
    events = run("events", "--reservation", "train", "--json").json
    whats = [event["what"] for event in events]
    assert (whats[0], whats[-1], "renewed" in whats) == ("created", "ended", True)
    assert events == run("events", "--reservation", reserved, "--json").json == run("events", reserved, "--json").json
    assert "no reservation 'nothing' on record" in run("events", "--reservation", "nothing").err
    assert "leave the others out" in run("events", "train", "--reservation", "train").err


def test_the_users_of_sql_agree_with_their_jobs_and_with_history(lab: Lab, run: Fray, jobs: dict[str, str]) -> None:
    users = {row["user"]: row for row in run("sql", "select * from users", "--json").json}
    launched = run("sql", "select user, min(launched_at) as first from jobs group by user", "--json").json
    assert {row["user"] for row in launched} <= users.keys()
    sums = {row["key"]: row for row in run("history", "--by", "user", "--since", "30d", "--json").json}
    for row in launched:
        user = users[row["user"]]
        assert user["first_seen"] <= row["first"] <= user["last_seen"]
        assert (user["jobs"], user["attempts"]) == (sums[row["user"]]["jobs"], sums[row["user"]]["attempts"])


def test_the_capacity_is_shown_of_now_and_over_time(lab: Lab, run: Fray) -> None:
    (node,) = run("nodes", "--json").json
    (cpu,) = run("capacity", "--kind", "cpu", "--json").json
    used_milli = node["cpu_milli"] - node["cpu_milli_free"]
    assert (cpu["total"], cpu["used"]) == pytest.approx((node["cpu_milli"] / 1000, used_milli / 1000))
    head, *lines = run("capacity").out.splitlines()
    assert head.split() == ["KIND", "ZONE", "TOTAL", "USED", "RESERVED", "IDLE", "QUARANTINED", "CLOSED"]
    assert [line.split()[0] for line in lines] == ["cpu", "memory"]
    assert run("capacity", "--zone", "elsewhere").out == "no machine is connected\n"
    assert run("capacity", "--since", "1h").code == 0
    assert "pass --since, too" in run("capacity", "--every", "1h").err
    assert "must be 60 to" in run("capacity", "--since", "1h", "--every", "5s").err
