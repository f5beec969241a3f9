"""The lab's own commands as a provider: real scripts, that succeed, fail, hang and talk nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from fray.controller.policy_file import read_policy_file
from fray.controller.providers.base import Join, MachineRequest, ProviderError
from fray.controller.providers.command import CommandProvider, read_options
from fray.errors import InvalidRequest
from fray.model.policy.machine_groups import (
    ErrorKind,
    GroupConfig,
    MachineState,
    SeenMachine,
)

LAB = """
case $1 in
create) printf '{"name": "%s", "group": "%s", "zone": "%s"}' "$FRAY_MACHINE" "$FRAY_GROUP" "$FRAY_ZONE" \\
          > "$LAB/$FRAY_MACHINE"; printf %s "$FRAY_NODE_CONFIG" > "$LAB.toml"; echo "$FRAY_CLUSTER" > "$LAB.cluster" ;;
delete) rm -f "$LAB/$FRAY_MACHINE" ;;
list)   printf '['; sep=
        for f in "$LAB"/*; do [ -f "$f" ] && { printf %s "$sep"; cat "$f"; sep=,; }; done; printf ']' ;;
esac
"""


def group(tmp_path: Path, **options: Any) -> GroupConfig:
    script = tmp_path / "lab.sh"
    script.write_text(LAB)
    (tmp_path / "lab").mkdir(exist_ok=True)
    verbs = {verb: ["/bin/sh", str(script), verb] for verb in ("create", "delete", "list")}
    env = {"LAB": str(tmp_path / "lab")}
    return GroupConfig(name="g", provider="command", zones=("z1",), options={**verbs, "env": env, **options})


CLUSTER = "cluster-1"


def request(config: GroupConfig, name: str = "g-cluste-1") -> MachineRequest:
    return MachineRequest(name, config, "z1", False, Join("fray://ctl:7421", "join:secret"))


async def test_machines_are_made_listed_and_deleted(tmp_path: Path) -> None:
    config = group(tmp_path)
    lab = CommandProvider(CLUSTER, [config])
    assert await lab.list() == ()
    await lab.create(request(config))
    await lab.create(request(config))
    await lab.create(request(config, "g-cluste-2"))
    assert await lab.list() == (SeenMachine("g-cluste-1", "g", "z1"), SeenMachine("g-cluste-2", "g", "z1"))
    assert (tmp_path / "lab.cluster").read_text() == "cluster-1\n"
    written = (tmp_path / "lab.toml").read_text()
    assert 'controller = "fray://ctl:7421"' in written
    assert '"machine" = "g-cluste-2"' in written
    assert "secret" not in written
    await lab.delete("g-cluste-1", "z1", "g")
    await lab.delete("g-cluste-1", "z1", "g")
    assert await lab.list() == (SeenMachine("g-cluste-2", "g", "z1"),)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (69, ErrorKind.STOCKOUT),
        (73, ErrorKind.QUOTA),
        (77, ErrorKind.PERMISSION),
        (64, ErrorKind.INVALID),
        (1, ErrorKind.TRANSIENT),
    ],
)
async def test_exit_codes_say_what_kind_of_error_it_was(code: int, kind: ErrorKind, tmp_path: Path) -> None:
    config = group(tmp_path, create=f"echo 'no more of these' >&2; exit {code}")
    with pytest.raises(ProviderError, match="no more of these") as caught:
        await CommandProvider("c", [config]).create(request(config))
    assert caught.value.kind is kind


async def test_a_command_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    config = group(tmp_path, create=f"(sleep 30; touch {mark}) & echo $! > {tmp_path}/pid; wait", timeout_s=0.3)
    with trio.fail_after(5), pytest.raises(ProviderError, match=r"took longer than 0.3 s") as caught:
        await CommandProvider("c", [config]).create(request(config))
    assert caught.value.kind is ErrorKind.TRANSIENT
    pid = int((tmp_path / "pid").read_text())
    with trio.fail_after(5):
        while is_alive(pid):  # noqa: ASYNC110
            await trio.sleep(0.01)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "said",
    [
        "nonsense",
        '{"name": "x"}',
        '[{"zone": "z"}]',
        '["x"]',
        '[{"name": "x", "state": "melted"}]',
        '[{"name": null}]',
        '[{"name": "x", "zone": ["z"]}]',
        '[{"name": "x", "hosts": 1e999}]',
        '[{"name": "x", "hosts": -1}]',
        '[{"name": "x", "hosts": true}]',
        '[{"name": "x", "hosts": 99999999999999999999}]',
        "[" * 20_000,
        '[{"name": "x"},',
    ],
)
async def test_nonsense_is_an_error_and_no_empty_list(said: str, tmp_path: Path) -> None:
    config = group(tmp_path, list=["printf", "%s", said])
    with pytest.raises(ProviderError, match="did not print a JSON array of machines") as caught:
        await CommandProvider("c", [config]).list()
    assert len(str(caught.value)) < 500


async def test_nothing_is_no_empty_list(tmp_path: Path) -> None:
    """Else machines would be dead because ``cloud list | jq`` has lost its first half."""
    config = group(tmp_path, list="false | cat")
    with pytest.raises(ProviderError, match=r"`list` printed nothing; print \[\]"):
        await CommandProvider("c", [config]).list()


async def test_states_hosts_and_messages_are_reported(tmp_path: Path) -> None:
    said = '[{"name": "big-c-7", "state": "PREEMPTED", "hosts": 3, "message": "taken"}]'
    config = group(tmp_path, list=["printf", "%s", said])
    (seen,) = await CommandProvider("c", [config]).list()
    assert seen == SeenMachine("big-c-7", "big", "", MachineState.PREEMPTED, 3, "taken")


async def test_machines_that_this_cluster_has_not_made_are_left_alone(tmp_path: Path, caplog: Any) -> None:
    """A script that forgets the label lists the whole project; machines that were not requested would be deleted."""
    names = ["g-cluste-1", "production-db", "g-otherc-1", "g-cluste-x", "g-cluste-", "-cluste-1", "cluste-1", ""]
    config = group(tmp_path, list=["printf", "%s", json.dumps([{"name": name, "group": "g"} for name in names])])
    lab = CommandProvider(CLUSTER, [config])
    for _ in range(2):
        assert [seen.name for seen in await lab.list()] == ["g-cluste-1"]
    (said,) = [record for record in caplog.records if "ignoring machines" in record.message]
    assert said.machines == 7
    assert "'g-cluste-x'" in said.names


@pytest.mark.parametrize("stream", ["", ">&2"])
async def test_output_without_end_is_not_waited_for(stream: str, tmp_path: Path) -> None:
    config = group(tmp_path, list=f"yes {stream}")
    with trio.fail_after(20), pytest.raises(ProviderError, match="printed more than 16777216 bytes"):
        await CommandProvider("c", [config]).list()


async def test_what_is_no_text_is_an_error(tmp_path: Path) -> None:
    config = group(tmp_path, list=r"""printf '[{"name": "g-c-\377"}]'""")
    with pytest.raises(ProviderError, match="is not valid UTF-8"):
        await CommandProvider("c", [config]).list()


async def test_a_command_that_ignores_signals_is_killed_and_leaves_no_zombie(tmp_path: Path) -> None:
    config = group(tmp_path, list=f"trap '' TERM INT HUP; echo $$ > {tmp_path}/pid; while :; do :; done", timeout_s=0.3)
    with trio.fail_after(5), pytest.raises(ProviderError, match=r"took longer than 0.3 s"):
        await CommandProvider("c", [config]).list()
    assert not is_there(int((tmp_path / "pid").read_text()))


async def test_a_daemon_that_holds_the_pipes_delays_no_command(tmp_path: Path) -> None:
    config = group(tmp_path, create="setsid sleep 5 & exit 0")
    with trio.fail_after(4):
        await CommandProvider("c", [config]).create(request(config))


async def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    config = group(tmp_path, list=["/nowhere/lab"])
    with pytest.raises(ProviderError, match="cannot run /nowhere/lab") as caught:
        await CommandProvider("c", [config]).list()
    assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"create": []}, r"options.create=\[\]: write a command"),
        ({"lst": "x"}, "unknown option 'lst'; there are create, delete, list, timeout_s, env"),
        ({"timeout_s": 0}, "options.timeout_s=0 must be"),
        ({"timeout_s": 121}, "options.timeout_s=121 must be .* at most 120"),
        ({"timeout_s": float("nan")}, "options.timeout_s=nan must be"),
        ({"timeout_s": float("inf")}, "options.timeout_s=inf must be"),
        ({"timeout_s": 10**400}, "options.timeout_s=1000"),
        ({"env": {"A": 1}}, "options.env"),
        ({"env": {"A=B": "x"}}, "options.env: 'A=B' cannot be the name of a variable"),
        ({"env": {"A": "\0"}}, "options.env: .* NUL"),
        ({"delete": ["rm", "a\0b"]}, "options.delete=.*: write a command"),
    ],
)
def test_options_that_cannot_be_are_refused_at_the_door(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=says):
        read_options(group(tmp_path, **options))


def test_the_policy_file_is_refused_with_the_group_and_the_option(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text('[[group]]\nname = "lab"\nprovider = "command"\n')
    with pytest.raises(InvalidRequest, match=r"policy.toml: \[\[group\]\] 'lab': options.create=None"):
        read_policy_file(file)
    file.write_text('[[group]]\nname = "p"\nprovider = "process"\noptions.detached = 1\n')
    with pytest.raises(InvalidRequest, match=r"options.detached=1 must be true or false"):
        read_policy_file(file)
