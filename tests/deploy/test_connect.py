"""Parsing of cluster specs, and errors of connections."""

from __future__ import annotations

import pytest
import trio

import fray
from fray.controller.serve import run_controller
from fray.controller.store import Store
from fray.deploy.cluster_spec import Spec, parse_spec, spec_text
from fray.net.transports.websocket import WebSocketNetwork


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("local", Spec("local")),
        ("machine", Spec("machine")),
        ("machine?nodes=3&cpu=0.5&memory=2GB", Spec("machine", nodes=3, cpu=0.5, memory="2GB")),
        ("machine?preload=numpy,pyarrow.compute", Spec("machine", preload=("numpy", "pyarrow.compute"))),
        ("fray://10.0.0.5:7000", Spec("fray", address="tcp:10.0.0.5:7000")),
        ("fray://head", Spec("fray", address="tcp:head:7421")),
        ("fray+unix:///run/fray.sock", Spec("fray", address="unix:/run/fray.sock")),
    ],
)
def test_a_spec_is_parsed(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize(
    ("address", "spec"),
    [
        ("tcp:127.0.0.1:7421", "fray://127.0.0.1:7421"),
        (f"tls:lab.example:7421#{'ab' * 32},{'cd' * 32}", "fray://lab.example:7421"),
        (f"tls:[fd00::1]:7421#{'ab' * 32}", "fray://[fd00::1]:7421"),
        ("unix:/run/fray.sock", "fray+unix:///run/fray.sock"),
    ],
)
def test_an_address_is_written_as_the_spec_that_leads_there(address: str, spec: str) -> None:
    assert spec_text(address) == spec
    place = address.partition(":")[2].partition("#")[0].replace("[", "").replace("]", "")
    assert parse_spec(spec).address.endswith(place)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lokal",
        "ray://x",
        "machine?nodes=0",
        "machine?nodes=x",
        "machine?cpus=4",
        "machine?preload=a;b",
        "fray://",
        "fray://h:99999",
    ],
)
def test_an_unknown_spec_is_refused_with_the_valid_ones(text: str) -> None:
    with pytest.raises(fray.UnknownClusterSpec, match=r"machine|fray://"):
        parse_spec(text)


async def test_an_unreachable_controller_is_reported_within_a_second() -> None:
    with trio.fail_after(1), pytest.raises(fray.Unreachable, match="fray-controller"):
        async with fray.open_cluster("fray://127.0.0.1:1", token="t"):
            pass


async def test_a_missing_token_is_reported_before_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRAY_TOKEN", raising=False)
    with pytest.raises(fray.InvalidRequest, match="FRAY_TOKEN"):
        async with fray.open_cluster("fray://127.0.0.1:1"):
            pass


async def test_a_driver_leaves_tls_out_only_where_it_is_asked_to_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with trio.open_nursery() as nursery:
        running = await nursery.start(run_controller, Store.memory(), WebSocketNetwork(), ["tcp:127.0.0.1:0"], "token")
        # This machine, by a name that does not say so: to the driver it is another one.
        elsewhere = f"fray://127.1:{running.addresses[0].rpartition(':')[2]}"
        for value in ("", "0", "yes"):
            monkeypatch.setenv("FRAY_INSECURE", value)
            with pytest.raises(fray.InvalidRequest, match="the fingerprint of its certificate authority is missing"):
                async with fray.open_cluster(elsewhere, token="token"):
                    pass
        assert "INSECURE" not in caplog.text
        monkeypatch.setenv("FRAY_INSECURE", "1")
        async with fray.open_cluster(elsewhere, token="token") as cluster:
            assert await cluster.nodes() == []
        (record,) = (each for each in caplog.records if "INSECURE" in each.message)
        assert record.levelname == "WARNING"
        assert record.message.startswith(f"INSECURE: traffic of {elsewhere} is neither encrypted nor protected")
        with pytest.raises(fray.InvalidRequest, match=r"is a public address \(8\.8\.8\.8\).*FRAY_INSECURE"):
            async with fray.open_cluster("fray://8.8.8.8:7421", token="token"):
                pass
        nursery.cancel_scope.cancel()


async def test_current_cluster_raises_outside_of_a_cluster() -> None:
    with pytest.raises(fray.FrayError, match="open_cluster"):
        fray.current_cluster()
