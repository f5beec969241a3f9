"""Downloads of saved weights: addresses that are signed and expire, and a tar that is made while it is sent."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import trio
from attrs import frozen
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from fray.tinker.api_store import TinkerCheckpoint
from fray.tinker.tinker_api.refusals import NotFound
from fray.tinker.tinker_api.requests import refusing
from fray.tinker.tinker_api.tinker_runs import TinkerRuns

URL_S = 900.0
"""Seconds for which an address is valid."""
FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files of saved weights that are given out; `peft` reads them. The optimizer's are not."""
COMPLETE = "checkpoint_complete"
"""Empty file at the end of a tar, by which clients see that it is whole."""
PART_BYTES = 1 << 20
BLOCK = tarfile.BLOCKSIZE


@frozen
class Download:
    """File, or tar of all files, that an address gives.

    Attributes:
        checkpoint: path of the checkpoint.
        user_id: who asked for the address.
        file: one of `FILES`; empty: a tar of all.
        until: Unix time at which it expires.
        key_mark: of the user's key then.
    """

    checkpoint: str
    user_id: str
    file: str
    until: int
    key_mark: str


class Downloads:
    """Signed addresses; they are valid until they expire, the key of their user ends, or the service is started again.

    Args:
        runs: state of the Tinker API.
        key_hash_of: returns the hash of the key of a user id; None: it has ended.
    """

    def __init__(self, runs: TinkerRuns, key_hash_of: Callable[[str], str | None]) -> None:
        self._runs, self._key_hash_of, self._key = runs, key_hash_of, secrets.token_bytes(32)

    def url(self, request: Request, user_id: str, checkpoint: TinkerCheckpoint, file: str = "") -> tuple[str, str]:
        """Return an address, by the name under which the client reaches the service, and when it expires (ISO 8601)."""
        until = int(time.time() + URL_S)
        content = json.dumps([checkpoint.id, user_id, file, until, self._key_mark(user_id)]).encode()
        token = base64.urlsafe_b64encode(content).decode().rstrip("=")
        base = str(request.base_url).rstrip("/")
        name = file or "checkpoint.tar"
        expires = datetime.fromtimestamp(until, UTC).isoformat()
        return f"{base}/api/v1/downloads/{token}.{self._signature(content)}/{name}", expires

    def route(self) -> Route:
        """Return the route of these addresses, which are themselves the keys to it."""

        async def download(request: Request) -> Response:
            return await self._answer(self._of_token(request.path_params["token"]))

        return Route("/api/v1/downloads/{token}/{name}", refusing(download))

    def _signature(self, content: bytes) -> str:
        return hmac.new(self._key, content, hashlib.sha256).hexdigest()

    def _key_mark(self, user_id: str) -> str:
        """Return what is other for each key of a user; empty: it has ended."""
        key_hash = self._key_hash_of(user_id)
        return "" if key_hash is None else self._signature(f"key {key_hash}".encode())

    def _of_token(self, token: str) -> Download:
        text, _, signature = token.rpartition(".")
        try:
            content = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except ValueError:
            content = b""
        if not hmac.compare_digest(self._signature(content).encode(), signature.encode()):
            raise NotFound("this address is not of this service, or the service was started again: ask for another")
        wanted = Download(*json.loads(content))
        if wanted.until <= time.time():
            raise NotFound(f"this address has expired: it was valid for {URL_S:g} s; ask for another")
        self._check_key(wanted)
        return wanted

    def _check_key(self, wanted: Download) -> None:
        if not wanted.key_mark or self._key_mark(wanted.user_id) != wanted.key_mark:
            raise NotFound("this address has ended with the key of its user")

    async def _checked(self, wanted: Download, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return parts while the key of their user is valid. Raises NotFound then, which ends the connection."""
        async for part in parts:
            self._check_key(wanted)
            yield part

    async def _answer(self, wanted: Download) -> Response:
        runs = self._runs
        checkpoint = runs.checkpoints.get(wanted.checkpoint)
        if checkpoint is None or (checkpoint.user_id != wanted.user_id and not checkpoint.is_public):
            raise NotFound(f"there is no checkpoint {wanted.checkpoint!r} any more")
        directory = runs.plan.directory_of(checkpoint.base_model) / checkpoint.weights
        members = []
        for name in [wanted.file] if wanted.file else FILES:
            try:
                members.append(TarMember(name, (await trio.Path(directory / name).stat()).st_size, directory / name))
            except OSError as error:
                raise NotFound(f"{wanted.checkpoint!r} has no file {name}: {error.strerror}") from None
        if wanted.file:
            size, content = members[0].size, parts_of(members[0])
        else:
            members.append(TarMember(COMPLETE, 0, None))
            size, content = tar_size(members), tar_parts(members, int(checkpoint.created_at))
        return StreamingResponse(
            self._checked(wanted, content),
            media_type="application/octet-stream" if wanted.file else "application/x-tar",
            headers={"Content-Length": str(size), "Cache-Control": "private, no-store"},
        )


@frozen
class TarMember:
    """File of a tar.

    Attributes:
        name: in the tar.
        size: bytes.
        path: where it is; None: it is empty.
    """

    name: str
    size: int
    path: Path | None


def tar_size(members: Sequence[TarMember]) -> int:
    """Return the bytes of a tar."""
    return sum(BLOCK + -(-member.size // BLOCK) * BLOCK for member in members) + 2 * BLOCK


async def tar_parts(members: Sequence[TarMember], time_s: int) -> AsyncIterator[bytes]:
    """Return a tar, part by part. Raises OSError if a file is shorter than it was."""
    for member in members:
        info = tarfile.TarInfo(member.name)
        info.size, info.mtime, info.mode = member.size, time_s, 0o644
        yield info.tobuf(tarfile.GNU_FORMAT)
        async for part in parts_of(member):
            yield part
        if padding := -member.size % BLOCK:
            yield b"\0" * padding
    yield b"\0" * (2 * BLOCK)


async def parts_of(member: TarMember) -> AsyncIterator[bytes]:
    """Return the bytes of a file, part by part. Raises OSError if it is gone, or shorter than it was."""
    if member.path is None:
        return
    left = member.size
    async with await trio.open_file(member.path, "rb") as file:
        while left:
            part = await file.read(min(PART_BYTES, left))
            if not part:
                raise OSError(f"{member.path} ends {left} bytes too early")
            left -= len(part)
            yield part
