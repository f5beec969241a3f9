"""Files of Unix sockets: private, replaced when stale, and at any path."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fray.errors import InvalidRequest, Refused
from fray.net.transports import sockets
from fray.net.transports.websocket import WebSocketNetwork
from fray.testing.conformance import CREDENTIAL


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
