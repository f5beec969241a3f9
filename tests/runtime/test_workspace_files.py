"""Selection of a workspace's files and their chunks, on real directories, with real git."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.errors import InvalidRequest
from fray.model.workspace import (
    FileEntry,
    Manifest,
    ManifestChunk,
    file_spans,
    is_outside,
    join_parts,
    manifest_parts,
    pack,
    plan_chunks,
    read_manifest,
    unpack_chunk,
    write_manifest,
)
from fray.runtime.workspaces import bundle as module
from fray.runtime.workspaces.bundle import (
    FileChanged,
    ScanCache,
    load_cache,
    read_chunk,
    save_cache,
    scan,
)
from fray.runtime.workspaces.files import Limits, list_files


def git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


def write(root: Path, path: str, content: str | bytes = "x") -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def age(root: Path) -> None:
    """Set all times in it to an hour ago, so that its stamps are trusted."""
    for place, _, files in os.walk(root):
        for name in files:
            os.utime(f"{place}/{name}", (time.time() - 3600,) * 2, follow_symlinks=False)


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stamps are trusted at once."""
    monkeypatch.setattr(module, "FRESH_NS", -(10**12))


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    root = tmp_path / "repo"
    root.mkdir()
    git(root, "init", "-q")
    write(root, ".gitignore", "data/\n*.log\n")
    write(root, "src/pkg/__init__.py", "")
    write(root, "src/pkg/a.py", "A = 1\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def paths(root: Path) -> list[str]:
    return [each.path for each in list_files(str(root))]


# Which ---------------------------------------------------------------------------------------------------------------


def test_only_files_that_git_tracks_or_would_track_are_sent(repo: Path) -> None:
    write(repo, "notes.txt")
    write(repo, "data/huge.bin")
    write(repo, "run.log")
    (repo / "src/pkg/a.py").unlink()
    assert paths(repo) == [".gitignore", "notes.txt", "src/pkg/__init__.py"]


def test_a_workspace_may_be_a_part_of_a_repository(repo: Path) -> None:
    assert paths(repo / "src") == ["pkg/__init__.py", "pkg/a.py"]


def test_executable_bits_and_inner_links_are_preserved(repo: Path) -> None:
    write(repo, "run.sh").chmod(0o755)
    (repo / "latest").symlink_to("src/pkg/a.py")
    (repo / "lib").symlink_to("src/pkg")
    modes = {each.path: each.mode for each in list_files(str(repo))}
    assert (modes["run.sh"], modes["latest"], modes["lib"], modes["src/pkg/a.py"]) == ("x", "l", "l", "f")


@pytest.mark.parametrize("target", ["/etc/passwd", "../other", "src/../../other"])
def test_a_link_that_leads_out_is_refused_by_its_name(repo: Path, target: str) -> None:
    (repo / "secret").symlink_to(target)
    with pytest.raises(InvalidRequest, match="'secret' leads out of the workspace"):
        list_files(str(repo))


def test_submodules_and_repositories_within_travel_by_their_own_rules(repo: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    write(inner, "b.py")
    write(inner, ".gitignore", "c.py\n")
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "b")
    git(repo, "submodule", "add", "-q", str(inner), "third/inner")
    write(repo, "third/inner/c.py")
    write(repo, "loose/d.py")
    git(repo / "loose", "init", "-q")
    assert {"third/inner/b.py", "third/inner/.gitignore", "loose/d.py"} <= set(paths(repo))
    assert "third/inner/c.py" not in paths(repo)


def test_without_a_repository_all_but_derived_files_travel(tmp_path: Path) -> None:
    for path in ("a.py", "pkg/b.py", "pkg/__pycache__/b.pyc", ".venv/x", "node_modules/y", "env/pyvenv.cfg", "env/z"):
        write(tmp_path, path)
    assert paths(tmp_path) == ["a.py", "pkg/b.py"]


def test_without_git_it_says_so_and_takes_all_but_derived_files(
    repo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    write(repo, "run.log")
    with caplog.at_level(logging.WARNING, "fray.workspace"):
        assert paths(repo) == [".gitignore", "run.log", "src/pkg/__init__.py", "src/pkg/a.py"]
    assert "git is not installed" in caplog.text


def test_paths_with_odd_characters_travel(repo: Path) -> None:
    names = ["a b\n'\"\t.txt", "ümläut.txt", os.fsdecode(b"latin-\xe9.txt"), "-n", "*"]
    for name in names:
        write(repo, name)
    bundle = scan(ScanCache(str(repo)), Limits())
    text = write_manifest(bundle.manifest)
    assert set(names) <= {entry.path for entry in read_manifest(text).files}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda root: root / "nothing", "is not a directory: pass the directory"),
        (lambda root: write(root, "a.py"), "is not a directory: pass the directory"),
        (lambda root: (root / "empty").mkdir() or root / "empty", "has no files"),
    ],
)
def test_an_invalid_workspace_is_refused(tmp_path: Path, make: object, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        list_files(str(make(tmp_path)))  # type: ignore[operator]


def test_too_much_is_refused_before_it_is_read_and_the_largest_are_named(repo: Path) -> None:
    for size in (3, 1, 2):
        with write(repo, f"model-{size}.bin").open("wb") as file:
            file.truncate(size * 10**9)
    with pytest.raises(InvalidRequest, match=r"model-3.bin \(2.794 GB\), model-2.bin .*\.gitignore.*storage") as caught:
        list_files(str(repo), Limits())
    assert caught.value.details["largest"][0] == ["model-3.bin", 3 * 10**9]
    with pytest.raises(InvalidRequest, match="at most 2 are allowed"):
        list_files(str(repo), Limits(total_bytes=10**10, file_bytes=10**10, files=2))
    raised = Limits.of({"FRAY_WORKSPACE_LIMIT": "10GB", "FRAY_WORKSPACE_FILE_LIMIT": "5GB"})
    assert len(list_files(str(repo), raised)) == 6


def test_a_file_that_cannot_be_read_is_named(repo: Path) -> None:
    write(repo, "closed.txt").chmod(0)
    for place in repo.parents:
        if place.stat().st_uid == os.geteuid() and not place.stat().st_mode & 0o001:
            place.chmod(0o755)
    if os.geteuid() == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(InvalidRequest, match=r"git cannot list|'closed.txt' .* cannot be read"):
            scan(ScanCache(str(repo)), Limits())
    finally:
        if os.getuid() == 0:
            os.seteuid(0)


# Cutting -------------------------------------------------------------------------------------------------------------


def contents(book: ScanCache, root: Path) -> dict[str, bytes]:
    """The files again, from manifest and pieces alone."""
    bundle = scan(book, Limits())
    manifest = join_parts(bundle.bundle, list(bundle.parts.values()))
    pieces = [unpack_chunk(piece, read_chunk(book, bundle, piece.blob)) for piece in manifest.chunks]
    found = {}
    for entry, where in file_spans(manifest):
        found[entry.path] = b"".join(pieces[span.chunk][span.at : span.at + span.size_bytes] for span in where)
        assert hashlib.sha256(found[entry.path]).hexdigest() == entry.blob
    return found


def test_the_files_come_out_of_the_pieces_as_they_went_in(tmp_path: Path) -> None:
    rng = random.Random(1)
    sizes = [0, 1, 100, 300_000, 262_144, 2_000_000, 524_288, 5, 0, 200_000, 200_000, 200_000, 200_000, 200_000]
    files = {f"{i:02}/f": rng.randbytes(size) if i % 2 else b"a" * size for i, size in enumerate(sizes)}
    for path, content in files.items():
        write(tmp_path, path, content)
    (tmp_path / "z").symlink_to("01/f")
    assert contents(ScanCache(str(tmp_path)), tmp_path) == {**files, "z": b"01/f"}


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3_000_000)), unique_by=lambda each: each[0], max_size=30)
)
def test_cuts_cover_everything_once_and_in_order(numbered: list[tuple[int, int]]) -> None:
    sizes = [(f"f{number:07}", size) for number, size in sorted(numbered)]
    flat = [span for piece in plan_chunks(sizes) for span in piece]
    covered = [0] * len(sizes)
    last = 0
    for index, at, size in flat:
        assert index >= last
        assert at == covered[index]
        assert size > 0
        covered[index], last = at + size, index
    assert covered == [size for _, size in sizes]
    assert all(sum(size for _, _, size in piece) <= 2 * 1024 * 1024 for piece in plan_chunks(sizes))


def test_thousands_of_files_are_few_pieces_and_an_edit_changes_one(tmp_path: Path) -> None:
    rng = random.Random(2)
    for number in range(2000):
        write(tmp_path, f"d{number // 100}/f{number}.py", rng.randbytes(1000).hex())
    before = scan(ScanCache(str(tmp_path)), Limits()).manifest
    assert len(before.chunks) < 40
    write(tmp_path, "d7/f777.py", "changed")
    write(tmp_path, "d7/new.py", "new")
    after = scan(ScanCache(str(tmp_path)), Limits()).manifest
    assert len({each.blob for each in after.chunks} - {each.blob for each in before.chunks}) <= 2


def test_the_same_files_are_the_same_bundle_wherever_they_are(repo: Path, tmp_path: Path) -> None:
    write(tmp_path / "copy", ".gitignore", (repo / ".gitignore").read_bytes())
    write(tmp_path / "copy", "src/pkg/__init__.py", b"")
    write(tmp_path / "copy", "src/pkg/a.py", (repo / "src/pkg/a.py").read_bytes())
    first, second = scan(ScanCache(str(repo)), Limits()), scan(ScanCache(str(tmp_path / "copy")), Limits())
    assert first.bundle == second.bundle
    write(repo, "src/pkg/a.py", "A = 2\n")
    assert scan(ScanCache(str(repo)), Limits()).bundle != first.bundle


@pytest.mark.parametrize("path", ["../a", "/a", "a/../b", "a//b", "", ".", "a/./b", "a\0"])
def test_a_manifest_cannot_name_a_path_outside(path: str) -> None:
    manifest = Manifest((FileEntry(path, "f", "0" * 64, 0),), ())
    with pytest.raises(InvalidRequest):
        read_manifest(write_manifest(manifest))


def test_a_manifest_that_writes_through_a_link_or_twice_or_beyond_its_pieces_is_refused() -> None:
    link, below = FileEntry("a", "l", "0" * 64, 0), FileEntry("a/b", "f", "0" * 64, 0)
    piece = ManifestChunk("1" * 64, 5, False)
    for manifest in (Manifest((link, below), ()), Manifest((link, link), ()), Manifest((link,), (piece,))):
        with pytest.raises(InvalidRequest):
            read_manifest(write_manifest(manifest))
    for text in (b"", b"{}", b"[1]", b'{"files":[[1]],"chunks":[]}', b'{"files":[["a","f","../x",0]],"chunks":[]}'):
        with pytest.raises(InvalidRequest):
            read_manifest(text)


HASH = "a" * 64


@pytest.mark.parametrize(
    "text",
    [
        '{"files":[["a","f","%s",Infinity]],"chunks":[]}' % HASH,  # noqa: UP031
        '{"files":[["a","f","%s",1e999]],"chunks":[]}' % HASH,  # noqa: UP031
        json.dumps({"files": [["a", "f", list(HASH), 0]], "chunks": []}),
        json.dumps({"files": [["a", "f", HASH, 1]], "chunks": [[list(HASH), 1, 0]]}),
        json.dumps({"files": [["a", "f", HASH, 1.5]], "chunks": [[HASH, 1, 0]]}),
        json.dumps({"files": [["a\ud800", "f", HASH, 0]], "chunks": []}),
        json.dumps({"files": [[None, "f", HASH, 0]], "chunks": []}),
        json.dumps({"files": [["a" * 256, "f", HASH, 0]], "chunks": []}),
        json.dumps({"files": [["a", "l", HASH, 4096]], "chunks": [[HASH, 4096, 0]]}),
        json.dumps({"files": [["a", "l", HASH, 0]], "chunks": []}),
        json.dumps({"files": [], "chunks": [[HASH, 0, 0]] * 1000}),
        json.dumps({"files": [["a", "f", HASH, 2000 * 10_001_000]], "chunks": [[HASH, 2_000_000, 1]] * 10_001}),
        "[" * 100_000,
    ],
)
def test_no_text_is_taken_for_a_manifest_or_raises_anything_but_a_refusal(text: str) -> None:
    with pytest.raises(InvalidRequest):
        read_manifest(text.encode())


def test_the_longest_name_of_a_file_system_is_allowed() -> None:
    manifest = Manifest((FileEntry("a" * 255, "f", HASH, 0), FileEntry("b\udcff", "f", HASH, 0)), ())
    assert read_manifest(write_manifest(manifest)) == manifest


def test_damaged_pieces_and_parts_are_refused() -> None:
    data, packed = pack(b"a" * 10_000)
    piece = ManifestChunk(hashlib.sha256(data).hexdigest(), 10_000, packed)
    assert packed
    assert unpack_chunk(piece, data) == b"a" * 10_000
    with pytest.raises(InvalidRequest):
        unpack_chunk(piece, data[:-1])
    bomb, _ = pack(b"a" * 10_000_000)
    with pytest.raises(InvalidRequest, match="more than"):
        unpack_chunk(ManifestChunk(hashlib.sha256(bomb).hexdigest(), 10, True), bomb)
    parts = manifest_parts(write_manifest(Manifest((), ())))
    with pytest.raises(InvalidRequest, match="not the parts"):
        join_parts("0" * 64, parts)


def test_links_are_judged_by_where_they_stand() -> None:
    assert not is_outside("a/b", "../c")
    assert is_outside("a/b", "../../c")
    assert is_outside("b", "..")
    assert not is_outside("b", "a/../c")
    assert is_outside("b", "/c")


# Remembering ---------------------------------------------------------------------------------------------------------


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    really = module.read_part

    def read_part(root: str, found: object, at: int, size_bytes: int) -> bytes:
        seen.append(found.path)  # type: ignore[attr-defined]
        return really(root, found, at, size_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "read_part", read_part)
    return seen


def test_an_unchanged_tree_is_not_read_again_not_even_by_the_next_driver(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: None
) -> None:
    seen = reads(monkeypatch)
    book = ScanCache(str(repo))
    first = scan(book, Limits())
    seen.clear()
    assert scan(book, Limits()) is first
    save_cache(book, tmp_path / "cache")
    next_driver = load_cache(str(repo), tmp_path / "cache")
    assert scan(next_driver, Limits()).bundle == first.bundle
    assert seen == []
    write(repo, "src/pkg/a.py", "A = 2\n")
    assert scan(next_driver, Limits()).bundle != first.bundle
    assert "src/pkg/a.py" in seen


def test_a_file_written_a_moment_ago_is_read_again(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second write within the clock's tick leaves the stamp as it is."""
    book = ScanCache(str(repo))
    scan(book, Limits())
    seen = reads(monkeypatch)
    scan(book, Limits())
    assert "src/pkg/a.py" in seen


def test_a_cache_that_cannot_be_read_or_written_costs_nothing_but_time(repo: Path, tmp_path: Path) -> None:
    book = ScanCache(str(repo))
    bundle = scan(book, Limits())
    cache = tmp_path / "cache"
    book.dirty = True
    save_cache(book, cache)
    (file,) = cache.iterdir()
    file.write_text("{nonsense")
    assert scan(load_cache(str(repo), cache), Limits()).bundle == bundle.bundle
    blocked = write(tmp_path, "file")
    book.dirty = True
    save_cache(book, blocked / "cache")


def test_a_file_that_changes_while_it_is_read_is_read_again(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really, times, until = module.read_part, 0, 2

    def read_part(root: str, found: object, at: int, size_bytes: int) -> bytes:
        nonlocal times
        if found.path == "src/pkg/a.py" and times < until:  # type: ignore[attr-defined]
            times += 1
            write(repo, "src/pkg/a.py", f"A = {times}; " * times)
        return really(root, found, at, size_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "read_part", read_part)
    book = ScanCache(str(repo))
    assert contents(book, repo)["src/pkg/a.py"] == b"A = 2; A = 2; "
    until = 1000
    with pytest.raises(InvalidRequest, match=r"'src/pkg/a.py' in the workspace .* changes while it is read"):
        scan(ScanCache(str(repo)), Limits())


def test_a_chunk_whose_file_has_changed_is_not_sent(repo: Path) -> None:
    book = ScanCache(str(repo))
    bundle = scan(book, Limits())
    book.fresh.clear()
    write(repo, "src/pkg/a.py", "A = 3\n")
    with pytest.raises(FileChanged):
        read_chunk(book, bundle, bundle.manifest.chunks[0].blob)
