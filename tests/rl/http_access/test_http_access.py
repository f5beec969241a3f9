"""Authority and key of HTTP ports beyond loopback: files, certificates, and hosts that are refused."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fray.errors import InvalidRequest
from fray.net import own_address
from fray.net.tls.certificates import issue_server, make_authority, read_certificate
from fray.rl.http_access import place
from fray.rl.http_access.access import check_host, load_access, load_authority, make_access


def test_a_directory_keeps_authority_and_key_which_its_owner_alone_can_read(tmp_path: Path) -> None:
    first = load_access("auto", tmp_path)
    modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "http").iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "key": 0o600}
    assert load_access("auto", tmp_path) == first
    assert load_authority(tmp_path) == first.authority
    other = make_access("auto")
    assert other.key != first.key
    assert other.authority.fingerprint != first.authority.fingerprint
    for secret in (first.key, first.authority.key.decode()):
        assert secret not in repr(first)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("key", "", "expected 32 characters or more; remove it"),
        ("ca.key", None, "the key of this authority is missing"),
        ("ca.pem", "x", "no certificate found"),
        ("ca.key", make_authority("x", 0.0).key.decode(), "the key does not belong to the certificate"),
    ],
)
def test_a_damaged_file_is_named(name: str, content: str | None, text: str, tmp_path: Path) -> None:
    load_access("auto", tmp_path)
    file = tmp_path / "http" / name
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(InvalidRequest, match=text) as refused:
        load_access("auto", tmp_path)
    assert str(tmp_path / "http") in str(refused.value)


def test_a_certificate_of_a_server_has_its_names_and_addresses_and_ends_with_its_authority() -> None:
    authority = make_authority("x", 0.0)
    info = read_certificate(issue_server(authority, ["gpu1.lab", "10.0.0.5", "fd00::2"], 1.0).chain)
    assert info.names == ("gpu1.lab", "10.0.0.5", "fd00::2")
    assert not info.is_authority
    assert info.not_after_s == read_certificate(authority.chain).not_after_s
    with pytest.raises(InvalidRequest, match=r"invalid host 'a\.\.b'"):
        issue_server(authority, ["a..b"], 1.0)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "a b", "http://x", "h:\n", "[::1]", None])
def test_a_host_that_a_url_cannot_have_is_refused(host: object) -> None:
    with pytest.raises(InvalidRequest, match="invalid http_host"):
        check_host("http_host", host)


def test_a_machine_without_an_address_for_others_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    check_host("http_host", "auto")
    monkeypatch.setattr(own_address, "ELSEWHERE", ("255.255.255.255", 9))  # without permission to broadcast: no route
    with pytest.raises(InvalidRequest, match="no address by which others reach it; name one: fray-node --advertise"):
        place.reached_at("auto")
