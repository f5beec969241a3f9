"""Files are written completely or not at all."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fray.net.atomic_file import write_atomically


def test_a_file_is_replaced_with_its_mode_and_time(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_atomically(file, b"old")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    write_atomically(file, iter([b"new ", memoryview(b"content")]), mode=0o755, durable=True, time_s=7)
    assert file.read_bytes() == b"new content"
    assert (stat.S_IMODE(file.stat().st_mode), file.stat().st_mtime) == (0o755, 7)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path, concurrent: bool) -> None:
    def parts() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("damaged")

    file = tmp_path / "file"
    write_atomically(file, b"old")
    with pytest.raises(ValueError, match="damaged"):
        write_atomically(file, parts(), concurrent=concurrent)
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_draft_of_a_killed_process_is_replaced_and_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("untouched")
    (tmp_path / "file.new").symlink_to(tmp_path / "elsewhere")
    write_atomically(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"
    assert (tmp_path / "elsewhere").read_text() == "untouched"
