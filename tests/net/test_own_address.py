"""The address at which others reach a machine: the one from which its controller sees it, unless that is translated."""

from __future__ import annotations

import socket

import pytest

from fray.net.own_address import ip_of, own_address


def test_the_origin_of_a_tcp_connection_has_an_address() -> None:
    assert ip_of("tcp:10.0.0.7:51234") == "10.0.0.7"
    assert ip_of("tcp:::ffff:10.0.0.7:51234") == "::ffff:10.0.0.7"
    assert [ip_of(other) for other in ("unix:pid=7", "memory:driver", "relay:session-a", "tcp:", "")] == [""] * 5


class Kernel:
    """Sockets of a machine with these addresses."""

    def __init__(self, *own: str) -> None:
        self.own = own

    def __call__(self, family: int, kind: int) -> Kernel:
        return self

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def bind(self, address: tuple[str, int]) -> None:
        if address[0] not in self.own:
            raise OSError(99, "Cannot assign requested address")


def test_an_address_of_this_machine_is_its_own_and_a_translated_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", Kernel("10.0.0.7", "fd00::7", "127.0.0.1", "169.254.1.1"))
    assert own_address("10.0.0.7") == "10.0.0.7"
    assert own_address("::ffff:10.0.0.7") == "10.0.0.7"
    assert own_address("fd00::7") == "fd00::7"
    assert own_address("203.0.113.9") == "", "that of a router"


@pytest.mark.parametrize("useless", ["127.0.0.1", "::1", "0.0.0.0", "169.254.1.1", "", "node-7", "10.0.0.7:51234"])
def test_other_machines_cannot_dial_it(useless: str) -> None:
    assert own_address(useless) == ""


def test_the_kernel_is_asked_for_addresses_of_this_machine() -> None:
    """The address is of TEST-NET-3, which no machine has (RFC 5737)."""
    assert own_address("203.0.113.1") == ""
