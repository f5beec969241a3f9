"""Pure targets of the fuzzers: one function each, which raises when something other than a refusal happens.

A target reads one example, in a fresh state, and returns a short text about what came of it. Examples with a new text
become parents of others. Anything but a `FrayError` that it raises is a finding.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import frozen

from fray.errors import FrayError
from fray.model.workspace import Manifest, read_manifest, write_manifest
from fray.net import codec
from fray.net.transports import http_upgrade
from fray.net.transports.websocket_frames import BINARY, PING, Control, PrefixOnly, Reader, head
from fray.node.workspaces.store import TreeCorrupted, WorkspaceStore
from tests.fuzz.mutation import mutate, mutate_json
from tests.fuzz.samples import sample_messages

LIMIT_BYTES = 1 << 20
REFUSALS = (FrayError, http_upgrade.HandshakeLost, http_upgrade.UpgradeRejected, TreeCorrupted)
"""Errors by which input is refused."""


@frozen
class Target:
    """One parser of input of others: how it is run, and how its examples are changed."""

    run: Callable[[bytes], str]
    change: Callable[[bytes, Sequence[bytes], random.Random], bytes]
    seeds: Callable[[], Sequence[bytes]]
    """Valid examples of today's code, besides the persisted ones."""


def outcome(error: Exception) -> str:
    """Return class and beginning of an error, without numbers, to tell kinds of refusals apart."""
    return f"{type(error).__name__} {''.join(char for char in str(error)[:60] if not char.isdigit())}"


# Handshake: heads of requests and answers ----------------------------------------------------------------------------


def read_heads(data: bytes) -> str:
    """Read bytes as the head of a dialer and as that of a listener."""
    found = []
    for first, read in ((b"GET ", _read_request), (b"HTTP/1.1 ", _read_response)):
        try:
            cut = http_upgrade.split_head(data, first)
            found.append("incomplete" if cut is None else read(cut[0]))
        except REFUSALS as error:
            found.append(outcome(error))
    return " | ".join(found)


def _read_request(head_bytes: bytes) -> str:
    key, headers = http_upgrade.read_request(head_bytes)
    return f"request with {len(headers)} headers" if key else "request without a key"


def _read_response(head_bytes: bytes) -> str:
    return f"answer with {len(http_upgrade.read_response(head_bytes, 'a-key'))} headers"


def _heads() -> Sequence[bytes]:
    return [
        http_upgrade.write_request("localhost", "a-key", {"Authorization": "Fray id=cluster nonce=abc proof=def"}),
        http_upgrade.write_response("a-key", {"Fray-Proof": "Fray nonce=abc proof=def"}),
        http_upgrade.write_challenge("a-challenge"),
        http_upgrade.write_refusal(401),
    ]


# Frames: a byte stream of WebSocket frames with batches of Fray's ----------------------------------------------------


def read_stream(data: bytes) -> str:
    """Read a byte stream whole and in pieces, which must come to the same."""
    whole = _read_pieces([data])
    size = 1 + hashlib.sha256(data).digest()[0] % 40
    pieces = _read_pieces([data[at : at + size] for at in range(0, len(data), size)])
    assert whole == pieces, f"whole: {whole}; in pieces of {size}: {pieces}"
    return " ".join(whole)


def _read_pieces(pieces: Sequence[bytes]) -> list[str]:
    reader, found = Reader(masked=True, limit_bytes=LIMIT_BYTES), []
    try:
        for piece in pieces:
            _feed(reader, piece)
            while (message := reader.next()) is not None:
                if isinstance(message, Control):
                    found.append(f"control {message.opcode}")
                else:
                    assert not isinstance(message, PrefixOnly)
                    found.append(_read_batch(bytes(message)))
    except REFUSALS as error:
        found.append(outcome(error))
    return found


def _feed(reader: Reader, piece: bytes) -> None:
    """Add bytes as a transport does: into the reader's place for a large frame while there is one."""
    while (place := reader.direct()) is not None and piece:
        if not len(place):
            break
        count = min(len(place), len(piece))
        place[:count] = piece[:count]
        reader.filled(count)
        piece = piece[count:]
        if count == len(place):
            break
    if piece:
        reader.feed(piece)


def _read_batch(message: bytes) -> str:
    try:
        codec.read_ack(message)
        return f"batch {[kind for kind, *_ in codec.read_frames(message)]}"
    except REFUSALS as error:
        return outcome(error)


def _streams() -> Sequence[bytes]:
    batch = codec.ACK.pack(7) + b"".join(
        codec.encode_frame(int(kind), number, b"body" * number) for number, kind in enumerate(list(codec.Kind)[:5])
    )
    large = codec.ACK.pack(0) + codec.encode_frame(1, 1, bytes(20_000))
    return [
        *(head(BINARY, len(data), True) + data for data in (batch, large, codec.ACK.pack(1))),
        head(BINARY, len(batch), True) + batch + head(PING, 4, True) + b"ping" + head(BINARY, 0, True),
    ]


# Messages: JSON of control messages ----------------------------------------------------------------------------------


def control_body(text: bytes, attachments: bytes = b"") -> bytes:
    """Return the body of a control frame with this JSON."""
    return len(text).to_bytes(4, "little") + text + attachments


def decode_text(text: bytes) -> str:
    """Decode a control message; what was decoded can be sent again, and comes to the same."""
    try:
        message, _ = codec.decode_message(control_body(text))
    except REFUSALS as error:
        return outcome(error)
    again = codec.encode_message(message)
    assert codec.encode_message(codec.decode_message(again)[0]) == again
    return type(message).__name__


# Bundles: manifests of workspaces and their chunks -------------------------------------------------------------------


def build_bundle(data: bytes) -> str:
    """Build the workspace of an example; nothing may appear, or be reached by links, outside of it.

    An example is ``{"files": [[path, mode, content], ...]}``, whose manifest has the right hashes, so that trees
    of changed files are built, too; or bytes of a manifest.
    """
    text, chunks = _manifest_of(data)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "inner" / "store"
        store = WorkspaceStore(root)
        store.open()
        for chunk in chunks:
            store.put_chunk(hashlib.sha256(chunk).hexdigest(), chunk)
        try:
            manifest = read_manifest(text)
            bundle = hashlib.sha256(text).hexdigest()
            _check_inside(store.build(bundle, manifest, ()))
            copy = root.parent / "copy"
            store.copy(bundle, copy, "ada")
            _check_inside(copy)
            found = f"tree of {len(manifest.files)} files"
        except REFUSALS as error:
            found = outcome(error)
        except OSError as error:
            found = f"error {error.errno} of the file system"
        assert sorted(os.listdir(folder)) == ["inner"], "something appeared outside of the store"
        assert set(os.listdir(root.parent)) <= {"store", "copy"}, "something appeared beside the store"
    return found


def _manifest_of(data: bytes) -> tuple[bytes, list[bytes]]:
    """Return the text of an example's manifest, and its chunks."""
    try:
        files = [
            (path, mode, str(content).encode("utf-8", "replace")) for path, mode, content in json.loads(data)["files"]
        ]
    except (ValueError, TypeError, KeyError, RecursionError):
        return data, []
    names = [hashlib.sha256(content).hexdigest() for _, _, content in files]
    entries = [[path, mode, name, len(content)] for (path, mode, content), name in zip(files, names, strict=True)]
    chunks = [[name, len(content), 0] for (_, _, content), name in zip(files, names, strict=True) if content]
    return json.dumps({"files": entries, "chunks": chunks}).encode(), [content for _, _, content in files]


def _check_inside(tree: Path) -> None:
    # `Path.resolve` raises RuntimeError for a link to itself, which leads nowhere.
    top = os.path.realpath(tree)
    for path in tree.rglob("*"):
        target = os.path.realpath(path)
        assert Path(target).is_relative_to(top), f"{path} leads out of the workspace, to {target}"


def _bundles() -> Sequence[bytes]:
    files = [
        ["data/numbers.txt", "f", "1 2 3"],
        ["data/zeros", "f", ""],
        ["link.py", "l", "data/../main.py"],
        ["main.py", "x", "print('hello')"],
    ]
    return [
        json.dumps({"files": files}).encode(),
        json.dumps({"files": [["a", "l", "d"], ["d/e/f", "f", "text"], ["d/up", "l", "../a/e"]]}).encode(),
        write_manifest(Manifest((), ())),
        _manifest_of(json.dumps({"files": files}).encode())[0],
    ]


TARGETS = {
    "handshake": Target(read_heads, mutate, _heads),
    "frames": Target(read_stream, mutate, _streams),
    "messages": Target(decode_text, mutate_json, sample_messages),
    "bundles": Target(build_bundle, mutate_json, _bundles),
}
