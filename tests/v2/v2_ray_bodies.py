"""Jobs and actors for the tests of `RayClient`; a module of its own, so that Ray's workers find them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import ray
from v2_contract import Counter, begin_and_wait, request, wait_for_file, write

from fray.v2 import current_actor, current_client


def count_up(path: Path) -> int:
    """Return the number of this attempt, from 1."""
    number = 1 + len(path.read_text() if path.exists() else "")
    write(path, "x" * number)
    return number


def write_assigned(path: Path) -> None:
    write(path, repr(ray.get_runtime_context().get_assigned_resources()))


def killed_until(path: Path, attempt: int) -> None:
    if count_up(path) < attempt:
        os.kill(os.getpid(), signal.SIGKILL)


def always_fails(path: Path) -> None:
    raise ValueError(f"attempt {count_up(path)}")


NAMES = ("FRAY_RANK", "FRAY_WORLD_SIZE", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MASTER_PORT")


def write_member(directory: Path) -> None:
    print("here")
    rank = int(os.environ["FRAY_RANK"])
    place = ray.util.get_current_placement_group().bundle_specs[rank]
    held = [f"{name}:{place[name]:g}" for name in sorted(place) if name.startswith(("TPU", "slice"))]
    words = [*(os.environ.get(name, "") for name in NAMES), *held]
    write(directory / f"member-{os.environ['FRAY_RANK']}", " ".join(words))


def rank_1_fails_once(directory: Path) -> None:
    if (directory / "failed").exists():
        return
    if os.environ["FRAY_RANK"] == "1":
        wait_for_file(directory / "0-began")
        write(directory / "failed")
        raise ValueError("rank 1")
    begin_and_wait(directory / "0-began", directory / "never")


def leave_things_behind(directory: Path) -> None:
    """End before the jobs and actors that this job made."""
    client = current_client()
    client.submit(request(begin_and_wait, directory / "began", directory / "never", name=f"child-{directory.name}"))
    client.create_actor(Counter, name=f"left-{directory.name}").add(1)
    wait_for_file(directory / "began")


def read_workspace() -> tuple[str, str]:
    import only_there  # type: ignore[import-not-found]

    return only_there.WORD, os.getcwd()


def through_ray(directory: Path) -> str:
    """Task of plain Ray that uses `fray.v2`."""
    client = current_client()
    client.submit(request(write, directory / "file")).wait(timeout=60)
    return type(client).__name__


class Frail:
    def __init__(self) -> None:
        self.n = 0

    def add(self) -> int:
        self.n += 1
        return self.n

    def crash(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def crash_once(self, mark: Path) -> str:
        if not mark.exists():
            write(mark)
            self.crash()
        return "second time"

    def give_up(self) -> None:
        current_actor().fail("no use")

    def leave(self) -> str:
        current_actor().terminate()
        return "bye"

    def quit(self) -> None:
        raise SystemExit(3)

    def assigned(self) -> Any:
        return ray.get_runtime_context().get_assigned_resources()

    def name_in_a_thread(self) -> str:
        names: list[str] = []
        thread = threading.Thread(target=lambda: names.append(current_actor().group_name))
        thread.start()
        thread.join()
        return names[0]

    def stopped_softly(self, began: Path, path: Path) -> None:
        write(began)
        until = time.monotonic() + 30
        while not current_actor().shutdown_event.wait(0.05) and time.monotonic() < until:
            pass
        write(path)
