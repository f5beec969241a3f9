"""The lab's own commands as a provider: real scripts, that succeed, fail, hang and talk nonsense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from fray.controller.policy_file import read_policy_file
from fray.controller.providers.base import Join, MachineRequest, ProviderError
from fray.controller.providers.command import CommandProvider, read_options
from fray.errors import InvalidRequest
from fray.model.fleet import ErrorKind, GroupConfig, MachineState, SeenMachine

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


def request(config: GroupConfig, name: str = "g-1") -> MachineRequest:
    return MachineRequest(name, config, "z1", False, Join("fray://ctl:7421", "join:secret"))


async def test_machines_are_made_listed_and_deleted(tmp_path: Path) -> None:
    config = group(tmp_path)
    lab = CommandProvider("cluster-1", [config])
    assert await lab.list() == ()
    await lab.create(request(config))
    await lab.create(request(config))
    await lab.create(request(config, "g-2"))
    assert await lab.list() == (SeenMachine("g-1", "g", "z1"), SeenMachine("g-2", "g", "z1"))
    assert (tmp_path / "lab.cluster").read_text() == "cluster-1\n"
    told = (tmp_path / "lab.toml").read_text()
    assert 'controller = "fray://ctl:7421"' in told
    assert '"machine" = "g-2"' in told
    assert "secret" not in told
    await lab.delete("g-1", "z1", "g")
    await lab.delete("g-1", "z1", "g")
    assert await lab.list() == (SeenMachine("g-2", "g", "z1"),)


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


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("said", ["nonsense", '{"name": "x"}', '[{"zone": "z"}]', '[{"name": "x", "state": "melted"}]'])
async def test_nonsense_is_an_error_and_no_empty_list(said: str, tmp_path: Path) -> None:
    config = group(tmp_path, list=["printf", "%s", said])
    with pytest.raises(ProviderError, match="no JSON array of machines"):
        await CommandProvider("c", [config]).list()


async def test_states_hosts_and_messages_are_told(tmp_path: Path) -> None:
    said = '[{"name": "a", "state": "PREEMPTED", "hosts": 3, "message": "taken"}]'
    config = group(tmp_path, list=["printf", "%s", said])
    (seen,) = await CommandProvider("c", [config]).list()
    assert seen == SeenMachine("a", "g", "", MachineState.PREEMPTED, 3, "taken")


async def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    config = group(tmp_path, list=["/nowhere/lab"])
    with pytest.raises(ProviderError, match="/nowhere/lab cannot be run") as caught:
        await CommandProvider("c", [config]).list()
    assert caught.value.kind is ErrorKind.INVALID


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"create": []}, r"options.create=\[\]: write a command"),
        ({"lst": "x"}, "unknown option 'lst'; there are create, delete, list, timeout_s, env"),
        ({"timeout_s": 0}, "options.timeout_s=0 must be"),
        ({"env": {"A": 1}}, "options.env"),
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
