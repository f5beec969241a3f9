"""Workspaces on their way from a driver through the controller to a machine: with cuts, restarts and full disks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings, strategies

from fray.controller.store import Store
from fray.controller.workspaces.bundles import BundleRetention
from fray.controller.workspaces.chunks import ChunkDirectory
from fray.errors import InvalidRequest, StoreError
from fray.model.environment import INSIDE, EnvironmentSpec
from fray.model.ids import mint
from fray.model.messages.bundles import BundleState, FetchBundle, FetchChunk, OfferBundle, PutChunk
from fray.model.messages.client import ClientHello, Role
from fray.model.specs import EntryKind, JobSpec
from fray.model.workspace import FileEntry, Manifest, ManifestChunk, find_escape, manifest_parts
from fray.net import part_transfers
from fray.net.channel.public import RedialPolicy
from fray.net.codec import blob_id
from fray.net.transport import Credential
from fray.node.launcher import RequestController
from fray.node.workspaces import store as trees
from fray.node.workspaces.preparer import WorkspaceFailed, Workspaces, paths_in
from fray.node.workspaces.store import WorkspaceRetention as Kept
from fray.node.workspaces.store import WorkspaceStore
from fray.runtime.controller_client.client import ControllerClient
from fray.runtime.workspaces import upload
from fray.runtime.workspaces.upload import send, set_workspace
from fray.scheduler.state.rows import SchedulerConfig
from tests.runtime.test_workspace_files import write
from tests.support.controller import (
    ADDRESS,
    TOKEN,
    Stage,
    spec,
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "project"
    rng = random.Random(3)
    for number in range(300):
        write(root, f"pkg{number // 50}/m{number}.py", rng.randbytes(2000).hex())
    write(root, "data.bin", rng.randbytes(1_500_000))
    write(root, "run.sh", "#!/bin/sh\n").chmod(0o755)
    (root / "link").symlink_to("pkg0/m1.py")
    return root


@asynccontextmanager
async def stage(store: Store, **options: Any) -> AsyncIterator[Stage]:
    async with trio.open_nursery() as nursery:
        stage = Stage(nursery, store, **options)
        await stage.start()
        yield stage
        nursery.cancel_scope.cancel()


async def link_to(stage: Stage) -> ControllerClient:
    """A driver's conversation, the real one."""
    link = ControllerClient(ClientHello(session=f"session-{mint(stage.rng)}", role=Role.DRIVER))

    async def hold(task_status: trio.TaskStatus[None]) -> None:
        network, credential = stage.network.at("driver"), Credential("cluster", TOKEN)
        policy = RedialPolicy(refused_is_final=False, give_up_s=60)
        await link.run(network, [ADDRESS], credential, policy=policy, rng=stage.rng, task_status=task_status)

    await stage.nursery.start(hold)
    await link.wait_ready(5)
    return link


def counted(ask: RequestController, seen: list[object]) -> RequestController:
    async def counting(message: object, blobs: Sequence[Any] = ()) -> Any:
        seen.append(message)
        return await ask(message)

    return counting


def fetched(seen: list[object]) -> int:
    return sum(isinstance(message, FetchChunk) for message in seen)


def same(tree: Path, project: Path) -> bool:
    """Return whether all files are unchanged, with their modes."""
    found = {path.relative_to(tree): path for path in tree.rglob("*") if path.is_symlink() or path.is_file()}
    wanted = {path.relative_to(project): path for path in project.rglob("*") if path.is_symlink() or path.is_file()}
    return found.keys() == wanted.keys() and all(
        found[name].read_bytes() == wanted[name].read_bytes()
        and found[name].is_symlink() == wanted[name].is_symlink()
        and (found[name].is_symlink() or bool(found[name].stat().st_mode & 0o100) == os.access(wanted[name], os.X_OK))
        for name in wanted
    )


def machine(tmp_path: Path, ask: RequestController, name: str = "machine", **options: Any) -> Workspaces:
    return Workspaces(tmp_path / name, ask, "boot", **options)


# The whole way -------------------------------------------------------------------------------------------------------


async def test_a_workspace_arrives_as_it_is_and_an_edit_costs_one_piece(project: Path, tmp_path: Path) -> None:
    seen: list[object] = []
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        machine_ = machine(tmp_path, counted(node.ask_blobs, seen))
        await machine_.copy_to(bundle, tmp_path / "first")
        assert same(tmp_path / "first", project)
        first = fetched(seen)
        write(project, "pkg1/m60.py", "edited")
        write(project, "pkg1/new.py", "new")
        (project / "pkg0/m0.py").unlink()
        edited = await send(link, str(project), upload.find_directory)
        assert edited != bundle
        seen.clear()
        await machine_.copy_to(edited, tmp_path / "second")
        assert same(tmp_path / "second", project)
        assert not machine_._turns
        assert first > 8
        assert fetched(seen) <= 1 + 3  # the manifest, and what the three files were in
        assert not same(tmp_path / "first", project)


async def test_the_same_again_is_one_question(project: Path, tmp_path: Path) -> None:
    seen: list[object] = []
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        machine_ = machine(tmp_path, counted(node.ask_blobs, seen))
        really = link.request_blobs
        asked: list[object] = []

        async def request_blobs(message: Any, *args: Any, **options: Any) -> Any:
            asked.append(message)
            return await really(message, *args, **options)

        link.request_blobs = request_blobs  # type: ignore[method-assign]
        assert await send(link, str(project), upload.find_directory) == bundle
        assert [type(message) for message in asked] == [OfferBundle]
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(machine_.copy_to, bundle, tmp_path / f"view{number}")
        pieces = [message.chunk for message in seen if isinstance(message, FetchChunk)]
        assert len(pieces) == len(set(pieces))
        assert sum(isinstance(message, FetchBundle) for message in seen) == 1


async def test_two_nodes_of_one_machine_fetch_once(project: Path, tmp_path: Path) -> None:
    seen: list[object] = []
    async with stage(Store(tmp_path / "store")) as st:
        link, one, two = await link_to(st), await st.node("n1"), await st.node("n2")
        bundle = await send(link, str(project), upload.find_directory)
        async with trio.open_nursery() as nursery:
            for number, node in enumerate((one, two)):
                there = machine(tmp_path, counted(node.ask_blobs, seen))
                nursery.start_soon(there.copy_to, bundle, tmp_path / f"view{number}")
        assert same(tmp_path / "view0", project)
        assert same(tmp_path / "view1", project)
        assert sum(isinstance(message, FetchBundle) for message in seen) == 1


async def test_an_attempt_that_writes_changes_no_other_workspace(project: Path, tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        machine_ = machine(tmp_path, node.ask_blobs)
        await machine_.copy_to(bundle, tmp_path / "one")
        (tmp_path / "one/pkg0/m1.py").write_text("vandal")
        (tmp_path / "one/data.bin").unlink()
        (tmp_path / "one/data.bin").write_bytes(b"vandal")
        await machine_.copy_to(bundle, tmp_path / "two")
        assert same(tmp_path / "two", project)


async def test_a_tree_that_was_written_to_is_built_again(project: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        machine_ = machine(tmp_path, node.ask_blobs)
        tree = await machine_.ready(bundle)
        victim = tree / "pkg0/m1.py"
        victim.chmod(0o644)
        victim.write_text("vandal")
        await machine_.copy_to(bundle, tmp_path / "view", lines.append)
        assert same(tmp_path / "view", project)
        assert any("'pkg0/m1.py' was modified; building it again" in line for line in lines)


async def test_a_copy_that_an_attempt_left_is_made_whole_for_the_next(project: Path, tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        machine_ = machine(tmp_path, node.ask_blobs)
        one, two = tmp_path / "one", tmp_path / "two"
        await machine_.copy_to(bundle, one)
        kept = (one / "pkg1/m50.py").stat().st_ino
        spoil(one, tmp_path)
        assert machine_.return_copy(bundle, one)
        assert not one.exists()
        await machine_.copy_to(bundle, two)
        assert same(two, project)
        assert (two / "pkg1/m50.py").stat().st_ino == kept
        (tmp_path / "elsewhere").write_text("vandal")  # a hard link that it kept is not shared with the next
        assert same(two, project)
        await machine_.copy_to(bundle, tmp_path / "three")  # no other one waits
        assert same(tmp_path / "three", project)


async def test_a_copy_of_an_earlier_version_does_for_the_next_one(project: Path, tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        machine_ = machine(tmp_path, node.ask_blobs)
        first = await send(link, str(project), upload.find_directory)
        await machine_.copy_to(first, tmp_path / "one")
        kept = (tmp_path / "one/pkg1/m50.py").stat().st_ino
        assert machine_.return_copy(first, tmp_path / "one")
        write(project, "pkg0/m1.py", "edited")
        write(project, "new/file.py", "new")
        shutil.rmtree(project / "pkg3")
        second = await send(link, str(project), upload.find_directory)
        await machine_.copy_to(second, tmp_path / "two")
        assert same(tmp_path / "two", project)
        assert (tmp_path / "two/pkg1/m50.py").stat().st_ino == kept


def spoil(copy: Path, outside: Path) -> None:
    """All that an attempt may do to its workspace."""
    (copy / "pkg0/m1.py").write_text("vandal")
    (copy / "pkg0/m2.py").unlink()
    (copy / "pkg0/m3.py").chmod(0o755)
    (copy / "pkg0/m4.py").unlink()
    (copy / "pkg0/m4.py").symlink_to("/etc/passwd")
    (copy / "elsewhere").touch()
    os.link(copy / "pkg0/m5.py", outside / "elsewhere")
    same_size = (copy / "pkg0/m6.py").read_bytes()[::-1]
    (copy / "pkg0/m6.py").write_bytes(same_size)
    (copy / "pkg0/__pycache__").mkdir()
    (copy / "pkg0/__pycache__/m1.pyc").touch()
    (copy / "link").unlink()
    (copy / "link").symlink_to("/etc")
    shutil.rmtree(copy / "pkg2")
    (copy / "pkg2").symlink_to("/tmp")
    (copy / "pkg3").chmod(0)
    (copy / "run.sh").chmod(0o644)


async def test_a_copy_is_not_given_to_another_user(project: Path, tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        machine_ = machine(tmp_path, node.ask_blobs)
        await machine_.copy_to(bundle, tmp_path / "one", user="ada")
        kept = (tmp_path / "one/pkg1/m50.py").stat().st_ino
        assert machine_.return_copy(bundle, tmp_path / "one", "ada")
        for name, user, is_kept in (("two", "bob", False), ("three", "", False), ("four", "ada", True)):
            await machine_.copy_to(bundle, tmp_path / name, user=user)
            assert ((tmp_path / name / "pkg1/m50.py").stat().st_ino == kept) is is_kept
            assert same(tmp_path / name, project)


def rewrite(file: Path) -> None:
    """Change a file, and put back its size and its modification time."""
    seen = file.stat()
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[::-1])
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    file.chmod(seen.st_mode)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (seen.st_size, seen.st_mtime_ns)


async def test_a_change_whose_size_and_time_were_put_back_is_found(project: Path, tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        machine_ = machine(tmp_path, node.ask_blobs)
        # At once after the copy was made, in the same tick of the clock perhaps.
        await machine_.copy_to(bundle, tmp_path / "one")
        rewrite(tmp_path / "one/pkg0/m1.py")
        assert machine_.return_copy(bundle, tmp_path / "one")
        await machine_.copy_to(bundle, tmp_path / "two")
        assert same(tmp_path / "two", project)
        # While it waits for its next attempt.
        assert machine_.return_copy(bundle, tmp_path / "two")
        (waiting,) = (tmp_path / "machine/copies").iterdir()
        rewrite(waiting / "pkg0/m2.py")
        await machine_.copy_to(bundle, tmp_path / "three")
        assert same(tmp_path / "three", project)
        # In the store itself, to which jobs of the node's own account can write.
        rewrite(tmp_path / "machine/trees" / bundle / "pkg0/m3.py")
        await machine_.copy_to(bundle, tmp_path / "four")
        assert same(tmp_path / "four", project)
        # A copy that another process of the node has handed out is not trusted.
        assert not machine(tmp_path, node.ask_blobs).return_copy(bundle, tmp_path / "four")


async def test_a_content_is_read_again_only_after_a_change(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    hash_of = trees._hash_of
    monkeypatch.setattr(trees, "_hash_of", lambda origin: read.append(origin) or hash_of(origin))
    monkeypatch.setattr(trees, "SETTLED_S", -1.0)
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        machine_ = machine(tmp_path, node.ask_blobs)
        await machine_.copy_to(bundle, tmp_path / "one")
        assert len(read) == 302
        await machine_.copy_to(bundle, tmp_path / "two")
        assert len(read) == 302
        os.utime(tmp_path / "machine/trees" / bundle / "pkg0/m3.py", (0, 0))
        seen = (tmp_path / "two/pkg0/m3.py").stat()
        os.utime(tmp_path / "machine/trees" / bundle / "pkg0/m3.py", ns=(0, seen.st_mtime_ns))
        await machine_.copy_to(bundle, tmp_path / "three")
        assert len(read) == 303


async def test_large_files_are_not_links_to_the_store(project: Path, tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        await machine(tmp_path, node.ask_blobs).copy_to(bundle, tmp_path / "own")
    original = (tmp_path / "machine/trees" / bundle / "data.bin").stat()
    own = (tmp_path / "own/data.bin").stat()
    assert own.st_ino != original.st_ino
    assert own.st_nlink == 1
    assert own.st_mode & 0o200


# Cuts and ends -------------------------------------------------------------------------------------------------------


async def test_cuts_and_a_restarted_controller_cost_only_what_was_under_way(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_transfers, "PARTS_AT_ONCE", 1)
    put: list[str] = []
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        source = await upload.find_directory(str(project))
        really = link.request_blobs

        async def request_blobs(message: Any, blobs: Any = (), **options: Any) -> Any:
            if isinstance(message, PutChunk):
                put.append(message.chunk)
                if len(put) == 3:
                    st.network.drop("driver")
                if len(put) == 6:
                    await st.crash()
                    await st.start()
            return await really(message, blobs, **options)

        link.request_blobs = request_blobs  # type: ignore[method-assign]
        bundle = await send(link, str(project), upload.find_directory)
        assert bundle == source.bundle
        assert len(put) == len(set(put))
        await machine(tmp_path, node.ask_blobs).copy_to(bundle, tmp_path / "view")
        assert same(tmp_path / "view", project)


async def test_a_node_that_is_killed_while_it_fetches_leaves_what_has_come(project: Path, tmp_path: Path) -> None:
    seen: list[object] = []
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        with trio.CancelScope() as life:

            async def ask(message: object, blobs: Sequence[Any] = ()) -> Any:
                if fetched(seen) == 5:
                    life.cancel()
                seen.append(message)
                return await node.ask_blobs(message)

            await machine(tmp_path, ask).copy_to(bundle, tmp_path / "never")
        store = tmp_path / "machine"
        (store / "trees" / f"{bundle}.new").mkdir()  # as a node that was killed at the next step leaves it
        (store / "files" / "half.123.new").write_text("ha")
        again: list[object] = []
        await machine(tmp_path, counted(node.ask_blobs, again)).copy_to(bundle, tmp_path / "view")
        assert same(tmp_path / "view", project)
        both = [m.chunk for m in (*seen, *again) if isinstance(m, FetchChunk)]
        assert len(both) - len(set(both)) <= 4
        assert list((store / "chunks").iterdir()) == []


async def test_who_waits_goes_on_when_the_one_who_fetched_is_cancelled(project: Path, tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        begun = trio.Event()

        async def ask(message: object, blobs: Sequence[Any] = ()) -> Any:
            begun.set()
            return await node.ask_blobs(message)

        machine_ = machine(tmp_path, ask)
        async with trio.open_nursery() as nursery:
            first = trio.CancelScope()

            async def cancelled() -> None:
                with first:
                    await machine_.copy_to(bundle, tmp_path / "never")

            nursery.start_soon(cancelled)
            await begun.wait()
            nursery.start_soon(machine_.copy_to, bundle, tmp_path / "view")
            first.cancel()
        assert same(tmp_path / "view", project)


def test_another_boot_of_the_machine_trusts_nothing(tmp_path: Path) -> None:
    first = WorkspaceStore(tmp_path, "one")
    first.open()
    first.put_chunk("a" * 64, b"data")
    WorkspaceStore(tmp_path, "one").open()
    assert first.has_chunk("a" * 64)
    WorkspaceStore(tmp_path, "two").open()
    assert not first.has_chunk("a" * 64)


# Full disks and damage -----------------------------------------------------------------------------------------------


def hostile(files: list[tuple[str, str, bytes]]) -> tuple[Manifest, dict[str, bytes]]:
    """A workspace that no driver of ours would make, and its pieces."""
    entries = tuple(FileEntry(path, mode, blob_id(content), len(content)) for path, mode, content in files)
    pieces = {blob_id(content): content for _, _, content in files}
    return Manifest(entries, tuple(ManifestChunk(blob, len(data), False) for blob, data in pieces.items())), pieces


async def test_a_controller_outlives_whatever_is_offered_as_a_manifest(tmp_path: Path) -> None:
    texts = [
        b'{"files":[["a","f","%s",Infinity]],"chunks":[]}' % (b"a" * 64),
        json.dumps({"files": [["a", "f", "a" * 64, 1]], "chunks": [[["a"] * 64, 1, 0]]}).encode(),
        b"\xff" * 100,
    ]
    async with stage(Store(tmp_path / "store")) as st:
        client = await st.client()
        for text in texts:
            parts = {blob_id(part): part for part in manifest_parts(text)}
            for piece, data in parts.items():
                await client.ask(PutChunk(chunk=piece), [data])
            with pytest.raises(InvalidRequest):
                await client.ask(OfferBundle(bundle=blob_id(text), parts=tuple(parts), size_bytes=-1))


async def test_pieces_do_not_take_what_the_controller_needs_whatever_was_offered(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    async with stage(store, retention=BundleRetention(reserve_bytes=1 << 60)) as st:
        client = await st.client()
        with pytest.raises(StoreError, match="free space on its disk"):
            await client.ask(PutChunk(chunk=blob_id(b"data")), [b"data"])
        assert store.chunks.ages() == {}


def test_links_that_lead_outside_together_are_created_on_no_machine(tmp_path: Path) -> None:
    """Each of them points inside, read as text: behind a link to a shallower directory, ``..`` is another one."""
    trees = WorkspaceStore(tmp_path / "trees")
    trees.open()
    manifest, pieces = hostile([("a/b/c/up", "l", b"../../.."), ("b", "l", b"a/b/c/up/../../etc")])
    for piece, data in pieces.items():
        trees.put_chunk(piece, data)
    with pytest.raises(InvalidRequest, match="'b' leads outside the workspace, through other links"):
        trees.build("0" * 64, manifest, ())
    assert list((tmp_path / "trees" / "trees").iterdir()) == []


@settings(max_examples=300)
@given(
    strategies.dictionaries(
        strategies.lists(strategies.sampled_from("abc"), min_size=1, max_size=3).map("/".join),
        strategies.lists(strategies.sampled_from(["a", "b", "c", "..", ".", ""]), min_size=1, max_size=5).map("/".join),
        max_size=5,
    )
)
def test_every_link_by_which_the_kernel_leaves_the_workspace_is_found(links: dict[str, str]) -> None:
    links = {
        path: target
        for path, target in links.items()
        if target and not any(path.startswith(f"{other}/") for other in links)
    }
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "1/2/3/4/5/6/7/8/root")
        for path in (*links, "a/x", "b/x", "c/x"):
            with suppress(FileExistsError):
                if not any(path.startswith(f"{link}/") for link in links):
                    (root / path).parent.mkdir(parents=True, exist_ok=True)
        for path, target in links.items():
            os.symlink(target, root / path)
        leads_out = False
        for path in links:
            with suppress(OSError, RuntimeError):  # nothing is there, or a loop
                leads_out = leads_out or not (root / path).resolve(strict=True).is_relative_to(root)
        if leads_out:
            assert find_escape(links) is not None


@pytest.mark.parametrize("target", [b"/etc", b"../../etc", b"a\0b", b"sub/../../x"])
def test_a_link_that_points_outside_is_created_on_no_machine(tmp_path: Path, target: bytes) -> None:
    trees = WorkspaceStore(tmp_path / "trees")
    trees.open()
    manifest, pieces = hostile([("link", "l", target)])
    for piece, data in pieces.items():
        trees.put_chunk(piece, data)
    with pytest.raises(InvalidRequest, match="points outside the workspace"):
        trees.build("0" * 64, manifest, ())
    assert not trees.has("0" * 64)
    assert list((tmp_path / "trees" / "trees").iterdir()) == []


async def test_a_full_disk_of_the_controller_is_said_and_nothing_half_done_stays(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "store")
    really, count, one_at_a_time = ChunkDirectory.put, 0, threading.Lock()

    def put(self: ChunkDirectory, piece: str, data: bytes) -> None:
        nonlocal count
        # Threads write chunks together: the fourth must be on the disk before the fifth fails.
        with one_at_a_time:
            count += 1
            if count > 4:
                raise OSError(errno.ENOSPC, "No space left on device")
            really(self, piece, data)

    monkeypatch.setattr(ChunkDirectory, "put", put)
    async with stage(store) as st:
        link = await link_to(st)
        with pytest.raises(StoreError, match="No space left on device; free space on its disk"):
            await send(link, str(project), upload.find_directory)
        assert store.chunks.ages() == {}
        monkeypatch.setattr(ChunkDirectory, "put", really)
        await send(link, str(project), upload.find_directory)


async def test_a_workspace_that_would_fill_the_controllers_disk_is_refused_at_once(
    project: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    async with stage(store, retention=BundleRetention(reserve_bytes=1 << 60)) as st:
        link = await link_to(st)
        with pytest.raises(StoreError, match=r"B free: this workspace of \d+\.\d+ MB would leave"):
            await send(link, str(project), upload.find_directory)
        assert store.chunks.ages() == {}


async def test_a_full_disk_of_the_machine_is_said(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)

        def full(*args: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(trees.WorkspaceStore, "put_chunk", full)
        machine_ = machine(tmp_path, node.ask_blobs)
        with pytest.raises(WorkspaceFailed, match="the disk is full: no space left for the workspace"):
            await machine_.copy_to(bundle, tmp_path / "view")
        monkeypatch.undo()
        monkeypatch.setattr(trees, "_copy_bytes", full)
        with pytest.raises(WorkspaceFailed, match="the disk is full: no space left for the workspace"):
            await machine_.copy_to(bundle, tmp_path / "view2")


async def test_a_piece_that_rots_on_the_controller_is_noticed_and_sent_again(project: Path, tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        link, node = await link_to(st), await st.node()
        bundle = await send(link, str(project), upload.find_directory)
        largest = max((tmp_path / "store/workspaces/chunks").iterdir(), key=lambda file: file.stat().st_size)
        largest.write_bytes(b"rotten")
        machine_ = machine(tmp_path, node.ask_blobs)
        with pytest.raises(WorkspaceFailed, match="damaged or missing on the controller: launch again"):
            await machine_.copy_to(bundle, tmp_path / "view")
        assert await send(link, str(project), upload.find_directory) == bundle
        await machine_.copy_to(bundle, tmp_path / "view")
        assert same(tmp_path / "view", project)


async def test_what_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        client, node = await st.client(), await st.node()
        name = hashlib.sha256(b"data").hexdigest()
        with pytest.raises(InvalidRequest, match="was damaged"):
            await client.ask(PutChunk(chunk=name), [b"other"])
        with pytest.raises(InvalidRequest, match="one attachment of at most"):
            await client.ask(PutChunk(chunk=name), [b"a" * 3_000_000])
        for piece in ("../../token", name):
            with pytest.raises(InvalidRequest):
                await node.ask(FetchChunk(chunk=piece))
        with pytest.raises(InvalidRequest, match="no such bundle"):
            await node.ask(FetchBundle(bundle="0" * 64))
        await client.ask(PutChunk(chunk=name), [b"data"])
        with pytest.raises(InvalidRequest):
            await client.ask(OfferBundle(bundle=name, parts=(name,), size_bytes=4))
        state = await client.ask(OfferBundle(bundle=name, parts=(name,), size_bytes=4))
        assert state == BundleState(complete=False, missing=(name,))


async def test_a_job_cannot_be_launched_with_a_workspace_that_is_not_there(tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store")) as st:
        client = await st.client()
        with pytest.raises(InvalidRequest, match="was not uploaded: upload it, and launch again"):
            await client.launch(spec(environment=EnvironmentSpec(bundle="0" * 64)))


# Keeping -------------------------------------------------------------------------------------------------------------


async def test_the_controller_keeps_what_living_jobs_need_and_drops_what_was_used_longest_ago(
    project: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    async with stage(store, retention=BundleRetention(limit_bytes=1, in_use_s=0.0, upload_s=0.0)) as st:
        link, client, node = await link_to(st), await st.client(), await st.node()
        bundles = []
        for number in range(3):
            write(project, "a.py", f"version = {number}")
            bundles.append(await send(link, str(project), upload.find_directory))
        await client.launch(spec(environment=EnvironmentSpec(bundle=bundles[0])))
        bundle_store = st.controller.gateway._context.bundles
        assert await bundle_store.sweep() == 2
        assert store.chunks.bundles().keys() == {bundles[0]}
        await machine(tmp_path, node.ask_blobs).ready(bundles[0])
        node.succeed("work-1:0:0")
        await client.job_ended("work-1")
        await node.until(lambda: not node.held or None)
        assert await bundle_store.sweep() == 1
        assert store.chunks.ages() == {}


async def test_payloads_and_results_of_jobs_that_are_no_longer_on_record_are_deleted(tmp_path: Path) -> None:
    async with stage(Store(tmp_path / "store"), rules=SchedulerConfig(finished_limit=1)) as st:
        client, node = await st.client(), await st.node()
        for number in range(3):
            payload, value = f"payload {number}".encode(), f"value {number}".encode()
            await client.launch(spec(f"work{number}", payload), payload=payload)
            await node.wait_desired(f"work{number}-1:0:0")
            node.succeed(f"work{number}-1:0:0", value)
            await client.job_ended(f"work{number}-1")
        await node.until(lambda: not node.held or None)
        assert st.store.blobs() == {blob_id(b"value 2")}
        assert [file.name for file in (tmp_path / "store/blobs").iterdir()] == [blob_id(b"value 2")]


async def test_what_is_left_of_an_upload_goes_after_a_while(project: Path, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    async with stage(store, retention=BundleRetention(upload_s=0.0)) as st:
        client = await st.client()
        await client.ask(PutChunk(chunk=hashlib.sha256(b"data").hexdigest()), [b"data"])
        await st.controller.gateway._context.bundles.sweep()
        assert store.chunks.ages() == {}


def built(trees_: WorkspaceStore, content: bytes, root: Path) -> str:
    write(root, "f", content)
    book = upload.ScanCache(str(root))
    bundle = upload.scan(book, upload.Limits())
    for piece in bundle.manifest.chunks:
        trees_.put_chunk(piece.blob, upload.read_chunk(book, bundle, piece.blob))
    lock = trees_.try_lock(bundle.bundle, trees.fcntl.LOCK_EX)
    assert lock is not None
    trees_.build(bundle.bundle, bundle.manifest, ())
    os.close(lock)
    return bundle.bundle


def test_a_machine_drops_what_was_used_longest_ago_and_never_what_is_in_use(tmp_path: Path) -> None:
    store = WorkspaceStore(tmp_path / "store")
    store.open()
    rng = random.Random(4)
    old, held, new = (built(store, rng.randbytes(100_000), tmp_path / f"p{n}") for n in range(3))
    for bundle, age_s in ((old, 300), (held, 200), (new, 100)):
        os.utime(tmp_path / "store/locks" / bundle, (time.time() - age_s,) * 2)
    lock = store.try_lock(held, trees.fcntl.LOCK_SH)
    os.utime(tmp_path / "store/locks" / held, (time.time() - 200,) * 2)
    assert lock is not None
    assert store.sweep(Kept(limit_bytes=250_000)) == 1
    assert [store.has(bundle) for bundle in (old, held, new)] == [False, True, True]
    assert store.sweep(Kept(unused_s=50)) == 1
    assert [store.has(bundle) for bundle in (old, held, new)] == [False, True, False]
    os.close(lock)
    assert len(list((tmp_path / "store/files").iterdir())) == 1
    shutil.rmtree(tmp_path / "store")


# Paths ---------------------------------------------------------------------------------------------------------------


def a_spec(cwd: str, *sys_path: str) -> JobSpec:
    return JobSpec(job_id="j-1", name="j", namespace="", entry=EntryKind.CALLABLE, cwd=cwd, sys_path=sys_path)


@pytest.mark.parametrize(
    ("cwd", "there"), [("/p", "/w"), ("/p/src", "/w/src"), ("/elsewhere", "/elsewhere"), ("/pp", "/pp")]
)
def test_paths_of_the_author_below_the_workspace_are_paths_in_the_copy(cwd: str, there: str) -> None:
    spec = set_workspace(a_spec(cwd, "/p/src", "/usr/lib", "/p"), "b" * 64, "/p")
    assert spec.sys_path == (INSIDE + "src", "/usr/lib", INSIDE)
    where = paths_in(spec, "/w")
    assert where[1] == ("/w/src", "/w")
    assert where[0] == (there if there.startswith("/w") else "/w")


def test_the_workspace_itself_is_found_last_if_the_author_had_it_not() -> None:
    spec = set_workspace(a_spec("/p", "/p/src", "/usr/lib"), "b" * 64, "/p")
    assert paths_in(spec, "/w")[1] == ("/w/src", "/w")
