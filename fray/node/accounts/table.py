"""Table of accounts: which user of the cluster has which uid on this machine.

Invariants: one uid is of one user at a time, and a user has one; both hold across restarts of the node, since the
table is on disk before a job starts. A uid goes to another user only when no attempt of the first one is here, no
process runs under it, and what it had is removed; of those the one that was not used for the longest time.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import trio
from attrs import define, field

from fray.model.specs import EndReason, JobAccount
from fray.net.atomic_file import write_atomically
from fray.node.accounts.leftovers import remove_leftovers
from fray.node.accounts.uid_range import UidRange
from fray.node.prepare import NotPrepared

FILE = "accounts.json"
NAMES_SHOWN = 5

log = logging.getLogger("fray.node")


@define
class _Row:
    uid: int
    used_at: float


@define(eq=False)
class AccountTable:
    """Accounts of one node.

    Args:
        uids: the configured range.
        state_dir: directory of the node; accounts may enter it.
        clean: removes what is left of a uid and returns what is still there; for tests.
    """

    uids: UidRange
    state_dir: Path
    clean: Callable[[int], str] = remove_leftovers
    _rows: dict[str, _Row] = field(factory=dict, init=False)
    _attempts: Counter[str] = field(factory=Counter, init=False)
    _assigning: trio.Lock = field(factory=trio.Lock, init=False)

    def open(self) -> None:
        """Read the table, and make its directory. Rows outside of the range are forgotten.

        Raises:
            OSError, ValueError: it cannot be read.
        """
        self._root.mkdir(mode=0o711, parents=True, exist_ok=True)
        # Whatever the umask is: accounts have to enter their own directories below it.
        self._root.chmod(0o711)
        if self._file.exists():
            stored = json.loads(self._file.read_text())
            self._rows = {
                user: _Row(uid, used_at) for user, (uid, used_at) in stored["users"].items() if uid in self.uids
            }
        for uid in self.assigned_uids:
            self._make_directories(uid)

    @property
    def assigned_uids(self) -> set[int]:
        """Uids that have a user."""
        return {row.uid for row in self._rows.values()}

    async def acquire(self, user: str, node: str = "") -> JobAccount:
        """Return the account of a user for one attempt; call `release` when nothing of the attempt is left.

        Raises:
            NotPrepared: all accounts are in use, or the table cannot be written.
        """
        if user not in self._rows:
            async with self._assigning:
                if user not in self._rows:
                    await self._assign(user, node)
        self._attempts[user] += 1
        self._rows[user].used_at = time.time()
        return self._account(user)

    def adopt(self, user: str) -> None:
        """Note an attempt that runs under the account of a user already."""
        self._attempts[user] += 1

    def release(self, user: str) -> None:
        """End the use of the account by one attempt."""
        self._attempts[user] -= 1
        if not self._attempts[user]:
            del self._attempts[user]
        if user in self._rows:
            self._rows[user].used_at = time.time()

    def _account(self, user: str) -> JobAccount:
        uid = self._rows[user].uid
        return JobAccount(uid=uid, gid=uid, name=user or "fray", directory=str(self._root / str(uid)))

    async def _assign(self, user: str, node: str) -> None:
        left = ""
        for uid, before in self._candidates():
            # At once: no attempt of its old user may begin while the rest of that user is removed.
            row = self._rows.pop(before, None)
            try:
                left = await trio.to_thread.run_sync(self._prepare_uid, uid)
            except BaseException:
                self._put_back(before, row)
                raise
            if left:
                log.warning("uid %d of --job-uids cannot be given to another user: %s", uid, left)
                self._put_back(before, row)
                continue
            self._rows[user] = _Row(uid, time.time())
            try:
                self._save()
            except OSError as error:
                del self._rows[user]
                raise NotPrepared(f"node {node} cannot store its table of accounts: {error}") from error
            return
        raise NotPrepared(self._full_text(user, node, left), EndReason.NO_ACCOUNT)

    def _put_back(self, user: str, row: _Row | None) -> None:
        if row is not None:
            self._rows[user] = row

    def _candidates(self) -> Iterator[tuple[int, str]]:
        """Yield the uids that may be given away, and the user of each (empty: none); the longest unused last ones."""
        taken = self.assigned_uids
        yield from ((uid, "") for uid in self.uids if uid not in taken)
        for user, row in sorted(self._rows.items(), key=lambda each: each[1].used_at):
            # Looked at again for each: an attempt may have begun meanwhile.
            if user in self._rows and not self._attempts[user]:
                yield row.uid, user

    def _prepare_uid(self, uid: int) -> str:
        """Remove what its last user has left, and make its directories; return what is still there. Blocks."""
        if left := self.clean(uid):
            return left
        shutil.rmtree(self._root / str(uid), ignore_errors=True)
        try:
            self._make_directories(uid)
        except OSError as error:
            return str(error)
        return ""

    def _make_directories(self, uid: int) -> None:
        """Make the directories of an account that are missing. The one above them stays root's: there is no name in it
        that the account could turn into a link."""
        account = JobAccount(uid=uid, gid=uid, name="", directory=str(self._root / str(uid)))
        os.makedirs(account.directory, 0o711, exist_ok=True)
        os.chmod(account.directory, 0o711)
        for directory in (account.home, account.environments):
            if not os.path.isdir(directory):
                os.mkdir(directory, 0o700)
                os.chown(directory, uid, uid, follow_symlinks=False)

    def _full_text(self, user: str, node: str, left: str) -> str:
        users = sorted(self._attempts)
        more = f" and {len(users) - NAMES_SHOWN} more" if users[NAMES_SHOWN:] else ""
        named = ", ".join(users[:NAMES_SHOWN]) + more
        why = f"all have attempts (of {named})" if users else left
        return (
            f"node {node} has no account for user {user!r}: of the {self.uids.last - self.uids.first + 1} uids of "
            f"--job-uids {self.uids} {why}; give fray-node a larger range"
        )

    def _save(self) -> None:
        stored = {user: (row.uid, row.used_at) for user, row in self._rows.items()}
        write_atomically(self._file, json.dumps({"uids": str(self.uids), "users": stored}).encode(), durable=True)

    @property
    def _root(self) -> Path:
        return self.state_dir / "accounts"

    @property
    def _file(self) -> Path:
        return self.state_dir / FILE
