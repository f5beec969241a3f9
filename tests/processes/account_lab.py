"""A cluster whose node runs as root and gives each user an account (``fray-node --job-uids``)."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fray.node.accounts.switch import closed_parent
from tests.processes.lab import TOKEN, Lab

FIRST_UID = 300_000_000


CLOSED = closed_parent(Path(sys.executable).resolve())
"""Directory, mostly root's home, that hides this interpreter from the accounts of jobs."""
INSTALLATION = Path(sys.base_prefix).resolve()

_OPEN = """
mkdir -p "$1" && mount --bind "$3" "$1" && mount -t tmpfs -o mode=755 none "$2" && mkdir -p "$3" &&
mount --bind "$1" "$3" || exit 70
shift 3
exec "$@"
"""
"""Script that mounts a directory in place of a closed one, with this interpreter alone in it."""


def prefix(aside: Path) -> list[str]:
    """Words in front of the command of a process whose accounts must be able to read this interpreter."""
    if CLOSED is None:
        return []
    unshare = ["unshare", "--mount", "--propagation", "private"]
    return [*unshare, "sh", "-c", _OPEN, "sh", str(aside), str(CLOSED), str(INSTALLATION)]


def _obstacle() -> str:
    """Reason why nothing here can run under accounts; empty: it can."""
    if os.geteuid() != 0:
        return "only root may change the account of a process"
    if CLOSED is None:
        return ""
    with tempfile.TemporaryDirectory() as aside:
        ran = subprocess.run([*prefix(Path(aside)), "true"], capture_output=True, check=False)
    return f"other accounts cannot read the interpreter below {CLOSED}" if ran.returncode else ""


OBSTACLE = _obstacle()
needs_accounts = pytest.mark.skipif(bool(OBSTACLE), reason=f"no accounts: {OBSTACLE}")


class AccountLab(Lab):
    """`Lab` in a directory that accounts may enter, with a range of uids of its own."""

    def __init__(self, directory: Path, count: int = 8) -> None:
        super().__init__(directory)
        self.first = FIRST_UID + secrets.randbelow(10_000_000) * 100
        self.uids = f"{self.first}-{self.first + count - 1}"
        self.token_file = directory / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text(TOKEN)
        self.state = directory / "n"

    def start(self, name: str, module: str, *arguments: str) -> None:
        words = prefix(self.directory / "aside") if module != "fray.controller.main" else []
        environ = {key: value for key, value in os.environ.items() if not key.startswith("FRAY_")}
        with (self.directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*words, sys.executable, "-m", module, *arguments],
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )

    def start_all(self, *arguments: str, policy: str = "", module: str = "fray.node") -> None:
        """Start the controller, with the text of a policy, and the node ``n``."""
        file = self.directory / "policy.toml"
        file.write_text(policy)
        self.start_controller("--token-file", str(self.token_file), *(["--policy", str(file)] if policy else []))
        self.wait_serving()
        self.start_node("n", *arguments, module=module)

    def start_node(self, name: str, *arguments: str, module: str = "fray.node") -> None:
        usual = ("--token-file", str(self.token_file), "--job-uids", self.uids)
        cache = ("--cache-dir", str(self.directory / "cache"))
        super().start_node(name, *usual, *cache, *arguments, module=module)

    @property
    def node_log(self) -> str:
        return (self.directory / "n.log").read_text()


@contextmanager
def open_account_lab(
    *arguments: str, count: int = 8, policy: str = "", module: str = "fray.node"
) -> Iterator[AccountLab]:
    """A controller and a node with accounts, ended at the end. ``module``: program of the node."""
    # Not below that of pytest, which is closed to other accounts.
    directory = Path(tempfile.mkdtemp(prefix="fray-accounts-"))
    directory.chmod(0o711)
    lab = AccountLab(directory, count)
    try:
        lab.start_all(*arguments, policy=policy, module=module)
        yield lab
    finally:
        lab.close()
        shutil.rmtree(directory)
