"""The environment of the systems Fray is compared with: what its pins say."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    return dict(PIN.findall((ROOT / name).read_text()))


def test_the_peers_stand_on_the_same_versions_as_fray_does() -> None:
    ours, theirs = pins("constraints.txt"), pins("bench/peers.txt")
    assert {name: theirs[name] for name in ours.keys() & theirs.keys()} == {
        name: ours[name] for name in ours.keys() & theirs.keys()
    }


def test_every_peer_that_can_be_named_is_pinned_and_every_pin_has_hashes() -> None:
    text = (ROOT / "bench/peers.txt").read_text()
    assert {"ray", "xoscar", "distributed", "trio", "cloudpickle"} <= pins("bench/peers.txt").keys()
    assert all("--hash=sha256:" in lines for lines in re.split(r"\n(?=\S)", text))
    assert "://" not in text, "the pins name no index"
