"""Preparation of the environment of an attempt: virtual environment or container image.

It is part of every node, and most nodes never build an environment: the modules for that are imported on first use.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

import trio
from attrs import define, evolve, field

from fray.model.environment import WORKSPACE_NAME
from fray.model.specs import AttemptSpec, EntryKind, JobAccount
from fray.model.text import byte_size_text, duration_text
from fray.net.tls.identity import IDENTITY_VARIABLE, identity_text
from fray.node.accounts.switch import give, set_environ
from fray.node.config import EnvironmentLimits
from fray.node.prepare import LeaseHandover, NotPrepared, PreparedEnvironment, Say

if TYPE_CHECKING:
    from fray.node.containers.images import Images
    from fray.node.environments.build_manager import BuildManager
    from fray.node.environments.cache import Environment, EnvironmentLock
    from fray.node.environments.recipe import Project, Recipe

EVICT_EVERY_S = 600.0
FILE_LIMIT_BYTES = 64 * 1024 * 1024
"""Limit for the size of ``pyproject.toml`` and ``uv.lock``."""


@define
class _EnvironmentLease:
    """Shared lock on one environment, held while attempts of this node use it."""

    environment: Environment
    lock: EnvironmentLock
    attempts: set[str] = field(factory=set)


class Environments:
    """The `fray.node.prepare.RequirementProvider` of real nodes.

    Args:
        directory: of the environments; all nodes of a machine and user share it.
        environ: environment variables of builders and uv: proxies, indexes, certificates.
        label: of this node's containers; empty for a new node, which has no containers to remove.
        makes_identities: make the certificates of processes that cannot make them, see `take_identity` of
            `fray.net.tls.identity`. For nodes whose connections have TLS.
    """

    def __init__(
        self,
        directory: Path,
        limits: EnvironmentLimits,
        environ: Mapping[str, str],
        *,
        label: str = "",
        makes_identities: bool = False,
    ) -> None:
        self.directory, self.limits, self.environ = directory, limits, dict(environ)
        self._makes_identities = makes_identities
        self.label = label
        self._builds: dict[Path, BuildManager] = {}
        self._images: Images | None = None
        self._nursery: trio.Nursery | None = None
        self._held: dict[tuple[Path, str], _EnvironmentLease] = {}
        self._adopted: list[tuple[EnvironmentLock, set[str]]] = []
        """Locks of the program that ran in this process before, with the attempts that use them."""
        self._ends_containers = True

    @property
    def pids(self) -> AbstractSet[int]:
        """See `EnvironmentServices.pids`."""
        builders = frozenset(pid for builds in self._builds.values() for pid in builds.pids)
        return builders | (self._images.pids if self._images is not None else frozenset[int]())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `EnvironmentServices.run`."""
        async with trio.open_nursery() as self._nursery:
            # Before the first attempt: containers of this node that exist now are of an earlier run.
            if self.label and self._ends_containers:
                await self._sweep_containers()
            task_status.started()
            while True:
                await trio.sleep(EVICT_EVERY_S)
                for directory in {self.directory, *self._builds}:
                    if directory.is_dir():
                        await self.evict(directory)

    async def evict(self, directory: Path | None = None) -> list[str]:
        """Remove the environments over the limits and return their keys. Runs in a thread: removing is slow on some
        disks.

        Args:
            directory: that of an account. Default: the one of all jobs without an account.
        """
        from fray.node.environments.cache import Cache

        limits = self.limits
        return await trio.to_thread.run_sync(Cache(directory or self.directory).evict, limits.size_bytes, limits.keep_s)

    async def prepare(self, attempt_spec: AttemptSpec, say: Say) -> PreparedEnvironment:
        """See `Preparer.prepare`. The files of the workspace are in the attempt's directory already, if it has any."""
        spec = attempt_spec.spec.environment
        workspace = f"{attempt_spec.directory}/{WORKSPACE_NAME}" if spec.bundle is not None else None
        if spec.docker_image is not None:
            return self._with_identity(attempt_spec, await self._prepare_container(spec.docker_image, say))
        if workspace is None and not spec.extras and not spec.pip_packages and spec.python in ("", own_python()):
            return PreparedEnvironment()  # most attempts: the node's own environment
        prepared = await self._prepare(attempt_spec, workspace, say)
        return prepared if spec.python in ("", own_python()) else self._with_identity(attempt_spec, prepared)

    def _with_identity(self, attempt_spec: AttemptSpec, prepared: PreparedEnvironment) -> PreparedEnvironment:
        """Add the certificate of a process whose Python cannot make it."""
        if not self._makes_identities or attempt_spec.spec.entry is EntryKind.BINARY:
            return prepared
        from fray.net.tls.certificates import make_host

        variable = {IDENTITY_VARIABLE: identity_text(make_host(time.time()))}
        return evolve(prepared, fixed_variables={**prepared.fixed_variables, **variable})

    async def _prepare(self, attempt_spec: AttemptSpec, workspace: str | None, say: Say) -> PreparedEnvironment:
        from fray.node.environments import overlay
        from fray.node.environments.recipe import BadRecipe, recipe_of

        try:
            project = _read_project(workspace)
            recipe = recipe_of(attempt_spec.spec.environment, overlay.base(), project)
            paths = () if workspace is None or project is None else _import_paths(workspace, project)
        except BadRecipe as error:
            raise NotPrepared(str(error)) from None
        if recipe is None:
            return PreparedEnvironment(sys_path=paths)
        if workspace is not None and attempt_spec.account is not None:
            _open_workspace(attempt_spec.directory, workspace, attempt_spec.account)
        found = await self._acquire(recipe, workspace, attempt_spec, say)
        return evolve(self._prepared_from(found, attempt_spec), sys_path=paths)

    async def _prepare_container(self, image: str, say: Say) -> PreparedEnvironment:
        from fray.node.containers.engine import find_engine
        from fray.node.environments import overlay

        # Looked for with each attempt: a docker daemon may start or stop at any time.
        engine = find_engine(self.environ)
        if engine is None:
            raise NotPrepared("cannot run docker_image: neither a responding docker daemon nor podman on this machine")
        await self._image_manager().ensure(engine, image, say)
        return PreparedEnvironment(image=image, engine=engine.program, label=self.label, library=overlay.links())

    def _image_manager(self) -> Images:
        from fray.node.containers.images import Images

        if self._images is None:
            self._images = Images(self.environ, self.limits.build_s)
        return self._images

    async def _sweep_containers(self) -> None:
        """Remove the containers that an earlier run of this node left; this run has not started any yet."""
        from fray.node.containers.engine import find_engine

        engine = find_engine(self.environ)
        if engine is not None:
            await self._image_manager().sweep(engine.program, self.label)

    async def clean_up(self, prepared: PreparedEnvironment, attempt_id: str) -> None:
        """See `EnvironmentServices.clean_up`."""
        if prepared.image:
            await self._image_manager().remove(prepared.engine, attempt_id)

    def _prepared_from(self, found: Environment, attempt_spec: AttemptSpec) -> PreparedEnvironment:
        """Return the preparation for the entry kind: the node's own zygote starts a program, while Python code is
        forked from a zygote of its environment."""
        entry = attempt_spec.spec.entry
        from fray.node.environments.recipe import variables_in

        changed = variables_in(found.venv, self.environ)
        if entry is EntryKind.BINARY:
            return PreparedEnvironment(variables=changed)
        if attempt_spec.account is not None:
            # A zygote is root's, and the environment's interpreter runs code of its packages at its start.
            return PreparedEnvironment(interpreter=found.interpreter, variables=changed, starts_cold=True)
        # An empty value means unset, as ``activate`` would unset it.
        environ = {key: value for key, value in {**self.environ, **changed}.items() if value or key not in changed}
        return PreparedEnvironment(interpreter=found.interpreter, environ=environ, lock_path=found.lock_path)

    async def _acquire(self, recipe: Recipe, workspace: str | None, attempt_spec: AttemptSpec, say: Say) -> Environment:
        account = attempt_spec.account
        # Each account builds its own: what one user has built runs for no other.
        directory = self.directory if account is None else Path(account.environments)
        held = self._held.get((directory, recipe.key))
        if held is None:
            environment, lock = await self._build_manager(directory, account).acquire(recipe, workspace, say)
            # Looked up again after the wait: one lock per environment is held, however many attempts use it.
            held = self._held.get((directory, recipe.key))
            if held is None:
                held = self._held[directory, recipe.key] = _EnvironmentLease(environment, lock)
            else:
                lock.close()  # another attempt acquired it meanwhile
        held.attempts.add(attempt_spec.attempt_id)
        return held.environment

    def _build_manager(self, directory: Path, account: JobAccount | None) -> BuildManager:
        from fray.node.environments.build_manager import BuildManager
        from fray.node.environments.cache import Cache

        # A uid may have got another user.
        if directory not in self._builds or self._builds[directory].account != account:
            assert self._nursery is not None, "environments need to run"
            environ = dict(self.environ)
            if account is not None:
                set_environ(environ, account)
            self._builds[directory] = BuildManager(
                Cache(directory), environ, self.limits.build_s, self._nursery, account
            )
        return self._builds[directory]

    async def describe(self) -> str:
        """See `EnvironmentServices.describe`."""
        if not self.directory.is_dir():
            return ""
        from fray.node.environments.cache import Cache

        try:
            cached = await trio.to_thread.run_sync(Cache(self.directory).entries)
        except OSError as error:
            return f"cannot be listed: {error}"
        if not cached:
            return ""
        size_bytes = sum(entry.size_bytes for entry in cached)
        return (
            f"{len(cached)} on disk ({byte_size_text(size_bytes)} of at most "
            f"{byte_size_text(self.limits.size_bytes)}, removed "
            f"{duration_text(self.limits.keep_s)} after the last use), {len(self._held)} in use"
        )

    def release(self, attempt_id: str) -> None:
        """See `EnvironmentServices.release`."""
        for key, held in list(self._held.items()):
            held.attempts.discard(attempt_id)
            if not held.attempts:
                held.lock.close()
                del self._held[key]
        for lock, attempts in self._adopted:
            attempts.discard(attempt_id)
            if not attempts:
                lock.close()
        self._adopted = [each for each in self._adopted if each[1]]

    def hand_over(self, attempts: Collection[str]) -> list[LeaseHandover]:
        """See `EnvironmentServices.hand_over`."""
        held = [*((each.lock, each.attempts) for each in self._held.values()), *self._adopted]
        used = [(lock, tuple(sorted(users.intersection(attempts)))) for lock, users in held]
        return [
            LeaseHandover(path=lock.path, descriptor=lock.fileno(), attempts=users) for lock, users in used if users
        ]

    def adopt(self, leases: Iterable[LeaseHandover]) -> None:
        """See `EnvironmentServices.adopt`."""
        from fray.node.environments.cache import EnvironmentLock

        self._ends_containers = False
        self._adopted = [(EnvironmentLock(each.path, each.descriptor), set(each.attempts)) for each in leases]


def _open_workspace(directory: str, workspace: str, account: JobAccount) -> None:
    """Let an account build the project in its workspace. The directory around it stays root's until the job starts."""
    try:
        give(workspace, account)
        os.chmod(directory, 0o711)
    except OSError as error:
        raise NotPrepared(f"the workspace cannot be given to its account: {error}") from error


def own_python() -> str:
    """Return the node's Python version, such as ``3.11``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _read_project(workspace: str | None) -> Project | None:
    from fray.node.environments.recipe import LOCK, PROJECT, BadRecipe, project_of

    found = {}
    for name in (PROJECT, LOCK) if workspace is not None else ():
        try:
            found[name] = _read_file(Path(workspace or "", name))
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise BadRecipe(f"the workspace's {name} cannot be read: {error}") from None
    return project_of(found)


def _read_file(path: Path) -> str:
    """Read a file of a workspace."""
    # The file may be a link to anything, and reading a pipe or a device would never end: hence the non-blocking open
    # and the check, of the descriptor and not of the path.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode) or seen.st_size > FILE_LIMIT_BYTES:
            raise OSError(f"not a regular file of at most {FILE_LIMIT_BYTES} bytes")
        return file.read(FILE_LIMIT_BYTES).decode()


def _import_paths(workspace: str, project: Project) -> tuple[str, ...]:
    """Return the import directories of the project's sources: the ``src`` of each, if it exists, else the source."""
    from fray.node.environments.recipe import source_directories

    found = []
    for source in source_directories(project):
        place = os.path.normpath(os.path.join(workspace, source))
        # As an editable install has it: in a src layout only what is below src can be imported.
        found += [path for path in (f"{place}/src", place) if os.path.isdir(path)][:1]
    return tuple(found)
