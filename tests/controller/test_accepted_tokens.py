"""Replacing the cluster's token: its file, the controller, and dialers that read it again."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from fray.controller.accepted_tokens import CHECK_S, AcceptedTokens, drop_previous_token, rotate_token
from fray.controller.options import parse, write_pins
from fray.errors import FrayError, InvalidRequest, Unauthorized
from fray.model.ids import NodeName
from fray.model.join_tokens import split_tokens
from fray.model.messages.client import ListNodes, Role
from fray.model.messages.people import ListKeys, ReadAudit
from fray.net.cluster_token import ClusterToken, read_token_file
from fray.net.transport import Credential
from tests.support.controller import Stage, spec, stage

PIN = "ab" * 32


def rotate(file: Path) -> str:
    rotate_token(file, random.SystemRandom())
    return read_token_file(str(file))[0][0]


def replace(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(f"first#{PIN}\n")
    return tmp_path / "token"


# The file ------------------------------------------------------------------------------------------------------------


def test_the_new_token_is_in_front_of_the_previous_one(file: Path) -> None:
    new = rotate(file)
    assert split_tokens(file.read_text()) == ((new, "first"), (PIN,))
    assert len(new) == 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    drop_previous_token(file)
    assert file.read_text() == f"{new}#{PIN}\n"


def test_a_token_is_not_replaced_while_a_previous_one_counts(file: Path) -> None:
    rotate(file)
    with pytest.raises(InvalidRequest, match="has a previous token already: drop it with `fray key rotate-token --fin"):
        rotate(file)


def test_a_controller_without_a_token_file_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="--token-file names the file from which fray-controller has its token"):
        rotate(tmp_path / "token")


def test_a_third_line_is_refused(file: Path) -> None:
    file.write_text("a\nb\nc\n")
    with pytest.raises(InvalidRequest, match=r"token: a token has at most 2 lines, .*, not 3"):
        read_token_file(str(file))


def test_fingerprints_are_written_into_both_lines(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRAY_TOKEN", raising=False)
    new = rotate(file)
    write_pins(parse(["--store", str(file.parent)]), ("cd" * 32,))
    assert file.read_text() == f"{new}#{'cd' * 32}\nfirst#{'cd' * 32}\n"


# The controller ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def controller(file: Path) -> AsyncIterator[Stage]:
    async with stage(token=AcceptedTokens(lambda: read_token_file(str(file))[0])) as cluster:
        yield cluster


async def test_both_tokens_count_until_the_previous_one_is_dropped(file: Path, autojump_clock: Any) -> None:
    async with controller(file) as cluster:
        new = rotate(file)
        await trio.sleep(CHECK_S + 1)
        for token in (new, "first"):
            assert (await cluster.client(credential=Credential("cluster", token))).welcomes
        drop_previous_token(file)
        await trio.sleep(CHECK_S + 1)
        assert (await cluster.client(credential=Credential("cluster", new))).welcomes
        with pytest.raises(Unauthorized):
            await cluster.client(credential=Credential("cluster", "first"))


async def test_a_file_that_cannot_be_read_changes_nothing(file: Path, autojump_clock: Any) -> None:
    async with controller(file) as cluster:
        os.unlink(file)
        await trio.sleep(CHECK_S + 1)
        assert (await cluster.client(credential=Credential("cluster", "first"))).welcomes


async def test_peers_that_read_the_file_again_continue_and_the_others_are_cut_off(
    file: Path, autojump_clock: Any
) -> None:
    async with controller(file) as cluster:
        node = await cluster.node(credential=ClusterToken(("first",), str(file)))
        stays = await cluster.client(credential=ClusterToken(("first",), str(file)), user="ada")
        (info,) = await stays.launch(spec("kept"))
        goes = await cluster.client(host="laptop", credential=Credential("cluster", "first"), user="bob")
        await node.wait_desired("kept-1:0:0")
        rotate(file)
        await trio.sleep(CHECK_S + 1)
        # Those that read the file have dialed again, so that what is left is what would be cut off.
        (using,) = (await stays.ask(ListKeys())).previous_token
        assert using == f"driver of bob, {goes.greeting().session} (memory:laptop)"  # type: ignore[attr-defined]
        drop_previous_token(file)
        await trio.sleep(CHECK_S + 1)
        assert isinstance(await goes.until(lambda: goes.ended), Unauthorized)
        # The same sessions, continued: no second greeting, and the job is there.
        assert len(stays.welcomes) == len(node.welcomes) == 1
        assert (stays.suspensions, node.suspensions) == (1, 1)
        (alive,) = (await stays.ask(ListNodes())).nodes
        assert alive.name == "n1"
        assert (await stays.ask(ListKeys())).previous_token == ()
        assert info.job_id in cluster.controller.state.jobs
        actions = [one.target for one in (await stays.ask(ReadAudit())).records if one.action == "token"]
        assert actions == ["replaced; the previous one is accepted, too", "the previous one is accepted no longer"]


async def test_users_do_not_see_what_uses_the_previous_token(file: Path, autojump_clock: Any) -> None:
    async with controller(file) as cluster:
        admin = await cluster.client(role=Role.TOOL, host="admin", credential=Credential("cluster", "first"))
        ada = await cluster.client(credential=await cluster.person("ada", "user", admin))
        rotate(file)
        await trio.sleep(CHECK_S + 1)
        assert len((await admin.ask(ListKeys())).previous_token) == 1
        assert (await ada.ask(ListKeys())).previous_token == ()


# Dialers -------------------------------------------------------------------------------------------------------------


async def test_a_node_that_was_away_comes_back_when_its_file_is_replaced(
    file: Path, tmp_path: Path, autojump_clock: Any, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "copy"
    replace(own, "first\n")
    async with controller(file) as cluster:
        node = await cluster.node(credential=ClusterToken(("first",), str(own)))
        new = rotate(file)
        drop_previous_token(file)
        await trio.sleep(CHECK_S + 20)
        assert node.ended is None
        assert node.suspensions == 1
        assert f"it was replaced; write the present one into {own}, which is read again for each attempt" in caplog.text
        replace(own, new)
        await trio.sleep(10)
        assert cluster.controller.gateway.node_requests(NodeName("n1")) is not None


async def test_a_file_that_was_replaced_before_the_controllers_is_no_reason_to_stay_away(
    file: Path, tmp_path: Path, autojump_clock: Any
) -> None:
    own = tmp_path / "copy"
    replace(own, "next\nfirst\n")
    async with controller(file) as cluster:
        source: Any = ClusterToken(("next", "first"), str(own))
        node = await cluster.node(credential=source)
        admin = await cluster.client(role=Role.TOOL, credential=Credential("cluster", "first"))
        # Not in a thread, during which the virtual clock would jump.
        replace(file, "next\nfirst\n")
        await trio.sleep(2 * CHECK_S)
        assert len((await admin.ask(ListKeys())).previous_token) == 2
        await trio.sleep(30 + CHECK_S)
        assert [one[:6] for one in (await admin.ask(ListKeys())).previous_token] == ["tool o"]
        assert len(node.welcomes) == 1
        replace(own, "other\n")
        # None of its tokens counts, and it has never been a member: that is a wrong token.
        source = ClusterToken(("other",), str(own))
        with pytest.raises(FrayError, match="does not accept the key"):
            await cluster.node("n2", credential=source)
