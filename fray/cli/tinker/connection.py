"""The service that a command names, by its address or its directory, and the key for it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fray.cli.output import explained_missing
from fray.errors import ConnectionFailed, InvalidRequest

KEY_VARIABLE = "FRAY_TINKER_KEY"
TIMEOUT_S = 30.0


class ServiceConnection:
    """Connection to a service.

    Args:
        connection: `JsonConnection`.
        name: of the service, for errors.
    """

    def __init__(self, connection: Any, name: str) -> None:
        self._connection, self._name = connection, name

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the body of an answer.

        Raises:
            InvalidRequest: the service refuses the request.
            ConnectionFailed: it cannot be reached, or does not answer in time.
        """
        try:
            reply = self._connection.request(method, path, body)
        except (ConnectionError, TimeoutError) as error:
            raise ConnectionFailed(f"{self._name} cannot be reached: {error}") from None
        if reply.status == 200:
            return reply.body
        detail = reply.body.get("detail") if isinstance(reply.body, dict) else reply.body
        hint = f"; give a key with --key-file FILE or {KEY_VARIABLE}" if reply.status == 401 else ""
        raise InvalidRequest(f"{self._name}: {detail!s:.500}{hint}")


@contextmanager
def open_service(options: argparse.Namespace) -> Iterator[ServiceConnection]:
    """Connect to the service of the options.

    Raises:
        InvalidRequest: none is named and none was served here, its directory has no file of a service, or the file with
            the key has none.
    """
    with explained_missing("fray tinker", "tinker"):
        from fray.tinker.http_client import JsonConnection
        from fray.tinker.operations.operator_file import OPERATOR_FILE, default_directory, read_operator_file
    directory = options.directory
    if directory is None and not options.url:
        directory = default_directory()
        if not (directory / OPERATOR_FILE).is_file():
            raise InvalidRequest(
                f"no service given, and none was served from {directory}: use --url http://host:8765, or "
                "--directory DIR with that of fray tinker serve"
            )
    if directory is not None:
        access = read_operator_file(directory)
        url, key, certificate = access.url, access.key, access.certificate
    else:
        url, key, certificate = options.url, "", ""
    shown = _key_in(options.key_file) if options.key_file else os.environ.get(KEY_VARIABLE, "").strip()
    key = shown or key
    connection = JsonConnection(
        url,
        timeout_s=TIMEOUT_S,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        ca_file=str(options.ca_file) if options.ca_file else None,
        pinned_file=certificate or None,
    )
    try:
        yield ServiceConnection(connection, f"the service at {url}")
    finally:
        connection.close()


def _key_in(path: Path) -> str:
    try:
        key = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"--key-file {path}: {getattr(error, 'strerror', None) or error}") from None
    if not key:
        raise InvalidRequest(f"--key-file {path}: the file is empty; expected a key such as otk_…")
    return key
