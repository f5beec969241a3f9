"""Unix sockets: their files are private, replaced when stale, and at any path; other accounts are refused."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from fray.errors import InvalidRequest, Refused, Unreachable
from fray.net.auth import KeyRegister
from fray.net.channel.dialer import is_final
from fray.net.transport import Transport
from fray.net.transports import sockets, websocket
from fray.net.transports.websocket import WebSocketNetwork
from fray.testing.conformance import CREDENTIAL, authorize


async def test_a_stale_socket_file_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    address = sockets.parse(f"unix:{tmp_path}/socket")
    with sockets.listening(address):
        with pytest.raises(InvalidRequest, match="cannot listen"), sockets.listening(address):
            pass
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "socket").exists()
    stale = sockets._bind(address)
    stale.close()
    with pytest.raises(Refused):
        await WebSocketNetwork().dial(address.text, CREDENTIAL, timeout_s=1)
    with sockets.listening(address):
        pass


def test_a_socket_file_appears_with_its_mode_and_accepts_connections_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link, seen = tmp_path / "socket", os.link, []

    def checked_link(source: str, target: str) -> None:
        assert not file.exists()
        assert os.stat(source).st_mode & 0o777 == 0o600
        assert os.stat(os.path.dirname(source)).st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(source)
        seen.append(target)
        link(source, target)

    monkeypatch.setattr(os, "link", checked_link)
    before = os.umask(0)
    try:
        with sockets.listening(sockets.parse(f"unix:{file}")):
            assert seen == [str(file)]
            assert os.listdir(tmp_path) == ["socket"]
    finally:
        os.umask(before)


@pytest.mark.parametrize("after", ["the first look", "the file is moved away"])
def test_a_listener_that_replaces_a_stale_file_first_keeps_its_place(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes start where a third one has died: both have found its file."""
    address = sockets.parse(f"unix:{tmp_path}/socket")
    sockets._bind(address).close()
    found = sockets._is_dead
    other: list[socket.socket] = []

    def look_and_be_overtaken(path: str) -> bool:
        dead = found(path)
        if not other and path.endswith("aside") is (after != "the first look"):
            monkeypatch.setattr(sockets, "_is_dead", found)
            other.append(sockets._bind(address))
        return dead

    monkeypatch.setattr(sockets, "_is_dead", look_and_be_overtaken)
    with pytest.raises(InvalidRequest, match="Address already in use"), sockets.listening(address):
        pass
    assert os.listdir(tmp_path) == ["socket"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(address.path)
        other[0].accept()[0].close()
    other[0].close()


def test_a_file_that_is_not_a_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "socket").write_text("notes")
    with (
        pytest.raises(InvalidRequest, match="cannot listen"),
        sockets.listening(sockets.parse(f"unix:{tmp_path}/socket")),
    ):
        pass
    assert (tmp_path / "socket").read_text() == "notes"
    assert os.listdir(tmp_path) == ["socket"]


async def test_a_path_too_long_for_the_kernel_can_be_used(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    address = sockets.parse(f"unix:{deep}/socket")
    with pytest.raises(Refused):
        await sockets.connect(address)
    with sockets.listening(address) as (listener, bound):
        assert bound == address.text
        client, _ = await sockets.connect(address)
        server, _ = await sockets.accept(listener)
        client.send(b"x")
        assert server.recv(1) == b"x"
        client.close()
        server.close()
    assert not (deep / "socket").exists()


def test_a_file_name_that_is_too_long_is_an_error() -> None:
    sockets.parse("unix:/" + "x" * 80)
    with pytest.raises(InvalidRequest, match="at most 80 bytes"):
        sockets.parse("unix:/" + "x" * 81)


class Keys(KeyRegister):
    """The key of the conformance suite, and the accounts that were refused."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, int]] = []

    def __call__(self, key_id: str) -> str | None:
        return authorize(key_id)

    def on_account_refused(self, remote: str, uid: int) -> None:
        self.refused.append((remote, uid))

    def on_outcome(self, key_id: str, remote: str, key: str | None) -> None:
        assert key == CREDENTIAL.key


@asynccontextmanager
async def listening(directory: Path, keys: KeyRegister) -> AsyncIterator[str]:
    """A listener at a socket that all accounts may open."""

    async def handler(transport: Transport) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        address = await nursery.start(WebSocketNetwork().listen, f"unix:{directory}/socket", keys, handler)
        (directory / "socket").chmod(0o666)
        with trio.fail_after(20):
            yield address
        nursery.cancel_scope.cancel()


async def test_a_unix_socket_admits_its_own_account_and_root_whatever_its_mode_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fray.net")
    keys, network = Keys(), WebSocketNetwork()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    async with listening(tmp_path, keys) as address:
        for uid in (1000, 0):
            monkeypatch.setattr(websocket, "peer_uid", lambda sock, uid=uid: uid)
            (await network.dial(address, CREDENTIAL, timeout_s=5)).abort()
        assert keys.refused == []
        monkeypatch.setattr(websocket, "peer_uid", lambda sock: 1001)
        with pytest.raises(Unreachable, match="it belongs to another account, and admits that one and root") as caught:
            await network.dial(address, CREDENTIAL, timeout_s=5)
        # Other addresses of the peer are tried, as after a refusal by the mode of the file.
        assert not is_final(caught.value)
    assert keys.refused == [(f"unix:pid={os.getpid()}", 1001)]
    assert "it runs under uid 1001, and this socket admits 1000 and root alone" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change the account of a process")
async def test_a_process_of_another_account_gets_no_challenge_from_a_unix_socket() -> None:
    keys, uid = Keys(), 312_345_678
    # Not below the directory of pytest, which is closed to other accounts.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.chmod(name, 0o755)
        async with listening(directory, keys) as address:
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.setresuid(uid, uid, uid)
                    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                        sock.connect(address.removeprefix("unix:"))
                        while data := sock.recv(4096):
                            os.write(write, data)
                except OSError as error:
                    os.write(write, repr(error).encode())
                finally:
                    os._exit(0)
            os.close(write)
            async with trio.lowlevel.FdStream(read) as stream:
                answer = b"".join([data async for data in stream])
            os.waitpid(pid, 0)  # noqa: ASYNC222 - it has closed its end of the pipe
    assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
    assert b"nonce" not in answer
    assert keys.refused == [(f"unix:pid={pid}", uid)]
