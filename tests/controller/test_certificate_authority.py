"""The controller as a certificate authority: its files, renewal, replacement, and the certificates of nodes."""

from __future__ import annotations

import json
import os
import stat
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from fray.cli import ca
from fray.cli.main import main
from fray.controller import certificate_authority
from fray.controller.certificate_authority import (
    CertificateAuthority,
    create,
    forget_previous,
    load,
    load_given,
    load_lab,
    load_own,
    rotate,
)
from fray.controller.options import make_token_reader, parse, write_pins
from fray.errors import InvalidRequest
from fray.model.join_tokens import split_pins, with_pins
from fray.net.tls import certificates
from fray.net.tls.identity import NODE_URI, read_pem
from fray.net.transports.tls_dialer import TlsDialer
from fray.net.transports.websocket import WebSocketNetwork
from fray.node.certificate import FILE, NodeCertificate
from fray.testing.conformance import CREDENTIAL, NetworkUnderTest, listener

NOW = 1_800_000_000.0
HOUR = 3600.0


def wall() -> float:
    """A wall clock that moves with the virtual one of Trio."""
    return NOW + trio.current_time()


def running(store: Path, clock: Callable[[], float]) -> CertificateAuthority:
    return CertificateAuthority(lambda _: load(store, clock()), clock=clock)


# Files ---------------------------------------------------------------------------------------------------------------


def test_the_authority_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    create(tmp_path, NOW)
    rotate(tmp_path, NOW + 1)
    assert stat.S_IMODE((tmp_path / "ca").stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "ca").iterdir()}
    assert modes == {"ca.pem": 0o600, "previous.pem": 0o600}


def test_the_command_makes_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "new" / "store"
    assert main(["ca", "init", "--store", str(store)]) == 0
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert load(store, time.time()).pins[0] in capsys.readouterr().out


def test_a_second_authority_is_not_made_by_accident(tmp_path: Path) -> None:
    made = create(tmp_path, NOW)
    with pytest.raises(InvalidRequest, match="`fray ca rotate` replaces it without a restart"):
        create(tmp_path, NOW)
    assert load(tmp_path, NOW) == made


def test_a_missing_authority_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="`fray ca init --store"):
        load(tmp_path, NOW)


def test_a_damaged_file_names_itself(tmp_path: Path) -> None:
    create(tmp_path, NOW)
    (tmp_path / "ca" / "ca.pem").write_text("x")
    with pytest.raises(InvalidRequest, match=r"ca/ca\.pem: no certificate found"):
        load(tmp_path, NOW)


def test_the_key_of_a_replaced_authority_is_not_kept(tmp_path: Path) -> None:
    old = create(tmp_path, NOW).current
    assert len(rotate(tmp_path, NOW + 1).pins) == 2
    kept = b"".join(file.read_bytes() for file in (tmp_path / "ca").iterdir())
    assert old.key.splitlines()[1] not in kept
    forget_previous(tmp_path)
    assert len(load(tmp_path, NOW + 1).pins) == 1


def test_two_authorities_at_most_are_accepted(tmp_path: Path) -> None:
    first = create(tmp_path, NOW).pins[0]
    second = rotate(tmp_path, NOW + 1).pins[0]
    third = rotate(tmp_path, NOW + 2)
    assert third.pins[1] == second
    assert first not in third.pins


def test_a_labs_own_authority_is_read_from_its_files(tmp_path: Path) -> None:
    lab = certificates.make_authority("lab", NOW)
    (tmp_path / "cert").write_bytes(lab.chain)
    (tmp_path / "key").write_bytes(lab.key)
    assert load_given(tmp_path / "cert", tmp_path / "key", NOW).fingerprint == lab.fingerprint
    with pytest.raises(InvalidRequest, match=r"--ca-cert .* No such file"):
        load_given(tmp_path / "none", tmp_path / "key", NOW)
    with pytest.raises(InvalidRequest, match="--ca-cert and --ca-key belong together"):
        parse(["--ca-cert", "x"])


# Tokens --------------------------------------------------------------------------------------------------------------


def test_the_token_that_the_controller_makes_has_the_fingerprints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FRAY_TOKEN", raising=False)
    options = parse(["--store", str(tmp_path)])
    (token,) = make_token_reader(options)()
    write_pins(options, ("ab" * 32, "cd" * 32))
    text = (tmp_path / "token").read_text()
    assert split_pins(text) == (token, ("ab" * 32, "cd" * 32))
    assert make_token_reader(options)() == (token,)
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    write_pins(options, ("ef" * 32,))
    assert split_pins((tmp_path / "token").read_text()) == (token, ("ef" * 32,))


def test_a_token_that_the_operator_has_chosen_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("secret")
    write_pins(parse(["--store", str(tmp_path), "--token-file", str(tmp_path / "mine")]), ("ab" * 32,))
    assert (tmp_path / "mine").read_text() == "secret"


def test_a_secret_may_contain_the_mark() -> None:
    assert split_pins("a#b") == ("a#b", ())
    assert split_pins(with_pins("a#b", ["ab" * 32])) == ("a#b", ("ab" * 32,))


# The running controller ----------------------------------------------------------------------------------------------


async def test_the_controllers_certificate_is_renewed_at_half_of_its_time(tmp_path: Path, autojump_clock: Any) -> None:
    create(tmp_path, NOW)
    authority = running(tmp_path, wall)
    contexts = {12: authority.server._made, 13: None}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(authority.run)
        await trio.sleep(11.9 * HOUR)
        assert authority.server._made is contexts[12]
        await trio.sleep(0.2 * HOUR)
        assert authority.server._made is not contexts[12]
        nursery.cancel_scope.cancel()


async def test_a_replaced_authority_is_taken_over_without_a_restart(tmp_path: Path, autojump_clock: Any) -> None:
    create(tmp_path, NOW)
    seen: list[tuple[str, ...]] = []
    authority = CertificateAuthority(lambda _: load(tmp_path, wall()), clock=wall, on_change=seen.append)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(authority.run)
        new = rotate(tmp_path, wall())
        await trio.sleep(certificate_authority.CHECK_S + 1)
        assert authority.pins == new.pins == authority.server.pins
        nursery.cancel_scope.cancel()
    assert [len(pins) for pins in seen] == [1, 2]


async def test_files_that_cannot_be_read_change_nothing(tmp_path: Path, autojump_clock: Any) -> None:
    before = create(tmp_path, NOW).pins
    authority = running(tmp_path, wall)
    os.truncate(tmp_path / "ca" / "ca.pem", 10)
    authority.refresh()
    assert authority.pins == before


def lab_files(tmp_path: Path, name: str) -> tuple[Path, Path]:
    lab = certificates.make_authority(name, NOW)
    (tmp_path / "cert").write_bytes(lab.chain)
    (tmp_path / "key").write_bytes(lab.key)
    return tmp_path / "cert", tmp_path / "key"


async def test_the_previous_authority_of_a_lab_is_accepted_until_it_is_dropped_also_after_a_restart(
    tmp_path: Path, autojump_clock: Any
) -> None:
    def start() -> CertificateAuthority:
        return CertificateAuthority(lambda running: load_lab(tmp_path / "store", *files, wall(), running), clock=wall)

    files = lab_files(tmp_path, "one")
    authority = start()
    (first,) = authority.pins
    lab_files(tmp_path, "two")
    for _ in range(2):
        authority.refresh()
        assert len(authority.pins) == 2
        assert authority.pins[1] == first
    restarted = start()
    assert restarted.pins == authority.pins
    assert restarted.authority.previous == authority.authority.previous
    forget_previous(tmp_path / "store")
    for one in (authority, restarted):
        one.refresh()
        assert one.pins == authority.pins[:1]


async def test_a_lab_authority_that_was_replaced_while_no_controller_ran_has_no_previous_one(
    tmp_path: Path, autojump_clock: Any
) -> None:
    files = lab_files(tmp_path, "one")
    read = lambda running: load_lab(tmp_path / "store", *files, wall(), running)  # noqa: E731
    authority = CertificateAuthority(read, clock=wall)
    lab_files(tmp_path, "two")
    authority.refresh()
    lab_files(tmp_path, "three")
    assert len(CertificateAuthority(read, clock=wall).pins) == 1


# Nodes ---------------------------------------------------------------------------------------------------------------


def own_certificate(tmp_path: Path, authority: CertificateAuthority, clock: Callable[[], float]) -> NodeCertificate:
    address = f"tls:controller:7421#{authority.pins[0]}"
    return NodeCertificate(TlsDialer(), str(tmp_path), address, clock)


def answer(authority: CertificateAuthority, asked: list[float], clock: Callable[[], float]) -> Any:
    from fray.model.messages.node import SignedCertificate

    async def request(message: Any) -> tuple[Any, Any]:
        asked.append(clock() - NOW)
        certificate, authorities = authority.sign("n1", message.request)
        return SignedCertificate(certificate=certificate, authorities=authorities), ()

    return request


async def test_a_node_renews_at_half_of_the_time_and_keeps_it_in_its_directory(
    tmp_path: Path, autojump_clock: Any
) -> None:
    create(tmp_path, NOW)
    authority, asked = running(tmp_path, wall), list[float]()
    node = own_certificate(tmp_path, authority, wall)
    with trio.move_on_after(30 * HOUR):
        await node.run(answer(authority, asked, wall))
    assert [round(at / HOUR) for at in asked] == [0, 12, 24]
    assert node.dialer.identity is not None
    assert certificates.read_certificate(node.dialer.identity.chain).names == (f"{NODE_URI}n1",)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    restarted = own_certificate(tmp_path, authority, wall)
    restarted.load()
    assert restarted.dialer.identity == node.dialer.identity


def test_a_node_shows_what_fray_ca_issue_has_put_into_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, state = tmp_path / "store", tmp_path / "node"
    store.mkdir()
    state.mkdir()
    pins = create(store, time.time()).pins
    assert main(["ca", "issue", "--store", str(store), "n1", "--out", str(state / FILE)]) == 0
    assert f"{state / FILE}: certificate of node n1 until " in capsys.readouterr().out
    assert stat.S_IMODE((state / FILE).stat().st_mode) == 0o600
    node = NodeCertificate(TlsDialer(), str(state), f"tls:controller:7421#{pins[0]}", time.time)
    node.load()
    assert node.dialer.identity is not None
    assert certificates.read_certificate(node.dialer.identity.chain).names == (f"{NODE_URI}n1",)


async def test_a_node_that_was_away_for_two_days_does_not_show_what_has_expired(
    tmp_path: Path, autojump_clock: Any
) -> None:
    create(tmp_path, NOW)
    authority = running(tmp_path, wall)
    node = own_certificate(tmp_path, authority, wall)
    with trio.move_on_after(HOUR):
        await node.run(answer(authority, [], wall))
    await trio.sleep(48 * HOUR)
    restarted = own_certificate(tmp_path, authority, wall)
    restarted.load()
    assert restarted.dialer.identity is None


async def test_a_node_knows_the_successor_of_the_authority_in_its_token(tmp_path: Path, autojump_clock: Any) -> None:
    create(tmp_path, NOW)
    authority = running(tmp_path, wall)
    first = authority.pins[0]
    node = own_certificate(tmp_path, authority, wall)
    for _ in range(2):
        rotate(tmp_path, wall())
        authority.refresh()
        node._renew_s = 0.0
        with trio.move_on_after(HOUR):
            await node.run(answer(authority, [], wall))
    # Replaced twice, so that the controller has nothing any more by which the first one vouches for it.
    assert first not in authority.pins
    assert node.address == f"tls:controller:7421#{','.join(authority.pins)}"
    assert set(authority.pins) < set(node.dialer.pins_of([first]))


async def test_a_node_that_gets_no_certificate_asks_again(tmp_path: Path, autojump_clock: Any) -> None:
    create(tmp_path, NOW)
    authority, asked = running(tmp_path, wall), list[float]()
    node, good = own_certificate(tmp_path, authority, wall), answer(authority, asked, wall)

    async def request(message: Any) -> tuple[Any, Any]:
        if trio.current_time() < 100:
            raise InvalidRequest("not now")
        return await good(message)  # type: ignore[no-any-return]

    with trio.move_on_after(HOUR):
        await node.run(request)
    assert node.dialer.identity is not None
    assert len(asked) == 1


async def test_connections_of_old_and_new_dialers_work_while_the_files_are_replaced(tmp_path: Path) -> None:

    create(tmp_path, time.time())
    authority = running(tmp_path, time.time)
    bench = NetworkUnderTest(WebSocketNetwork(tls_server=authority.server), "tls:127.0.0.1:0")
    async with listener(bench) as (address, accepted):
        place, _, old = address.partition("#")
        rotate(tmp_path, time.time())
        authority.refresh()
        for pin in (old, *authority.pins, ",".join(authority.pins)):
            near = await WebSocketNetwork().dial(f"{place}#{pin}", CREDENTIAL, timeout_s=10)
            await accepted.receive()
            near.abort()
        assert read_pem(authority.authority.previous)


# Command line --------------------------------------------------------------------------------------------------------


async def test_fray_ca_shows_the_authority_of_a_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, files = tmp_path / "store", lab_files(tmp_path, "one")
    options = Namespace(store=store, json=True, finish=False, node="n1", out=tmp_path / "n1.pem")

    async def shown() -> list[str]:
        assert await ca.show(options) == 0
        return [each["fingerprint"] for each in json.loads(capsys.readouterr().out)]

    lab = load_lab(store, *files, NOW, None)
    assert await shown() == list(lab.pins)
    lab_files(tmp_path, "two")
    two = load_lab(store, *files, NOW, lab)
    assert await shown() == list(two.pins)
    assert len(two.pins) == 2
    for verb in (ca.rotate, ca.issue):
        with pytest.raises(InvalidRequest, match=r"is that of --ca-cert and --ca-key .*: replace both files to rotate"):
            await verb(options)
    options.finish = True
    assert await ca.rotate(options) == 0
    assert [each["fingerprint"] for each in json.loads(capsys.readouterr().out)] == [two.pins[0]]
    assert b"PRIVATE" not in b"".join(file.read_bytes() for file in (store / "ca").iterdir())
    # A controller that is started without the option has an authority of its own.
    own = load_own(store, time.time())
    assert await shown() == list(own.pins)
