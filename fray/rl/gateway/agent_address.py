"""Address of a session for an agent, with what its client needs."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path
from typing import Any

ANY_KEY = "-"
"""Key of sessions on loopback: OpenAI clients send one, and it is not looked at."""
AUTHORITY_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
"""Variables that name the authorities a program trusts: with OpenSSL or httpx, with requests, with Node."""


class AgentUrl(str):
    """``base_url`` of a session: a string.

    Attributes:
        api_key: key of the run; on loopback any will do, and this is ``"-"``.
        ca_file: file of this machine with the authorities that this machine trusts, and that of the run; empty on
            loopback, which is without TLS.
    """

    api_key: str
    ca_file: str

    def __new__(cls, url: str = "", api_key: str = ANY_KEY, ca_file: str = "") -> AgentUrl:
        found = super().__new__(cls, url)
        found.api_key, found.ca_file = api_key, ca_file
        return found

    @property
    def env(self) -> dict[str, str]:
        """Variables for a process of this machine with an OpenAI client: address, key and authorities."""
        trusted = dict.fromkeys(AUTHORITY_VARIABLES, self.ca_file) if self.ca_file else {}
        return {"OPENAI_BASE_URL": str(self), "OPENAI_API_KEY": self.api_key, **trusted}


def trusted_file(authority: bytes) -> Any:
    """Return an open temporary file with the authorities that this machine trusts, and another one (PEM)."""
    # Agents use the web, too, and those variables replace what they trust otherwise.
    usual = Path(ssl.get_default_verify_paths().cafile or _package_file())
    file = tempfile.NamedTemporaryFile(prefix="fray-agent-ca-", suffix=".pem")  # noqa: SIM115 (the caller keeps it)
    file.write(usual.read_bytes().rstrip() + b"\n" + authority)
    file.flush()
    return file


def _package_file() -> str:
    # Here: it comes with httpx, which a process without agents need not have.
    import certifi

    return certifi.where()
