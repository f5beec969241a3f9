"""Jobs that are watched: what they do is in their names."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time

import trio

import fray


def count_to(last: int, pause_s: float = 0.0) -> int:
    for done in range(1, last + 1):
        fray.progress(done, last, "steps")
        time.sleep(pause_s)
    return last


async def count_in_loop(last: int, pause_s: float) -> int:
    for done in range(1, last + 1):
        fray.progress(done, last, "steps")
        await trio.sleep(pause_s)
    return last


def count_in_a_thread_and_a_process() -> None:
    thread = threading.Thread(target=count_to, args=(10,))
    thread.start()
    thread.join()
    time.sleep(0.3)
    child = multiprocessing.get_context("fork").Process(target=count_to, args=(20,))
    child.start()
    child.join()


def linger_here(seconds: float) -> None:
    fray.progress(1, 2)
    time.sleep(seconds)


def hold_the_interpreter(seconds: int) -> None:
    """In C, with its lock: no Python code runs in this process until it returns."""
    fray.progress(1, 2)
    ctypes.PyDLL(None).sleep(seconds)


async def wait_in_a_task(seconds: float) -> None:
    async def patient_child() -> None:
        await trio.sleep(seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(patient_child)


def stall_the_first_time(path: str) -> str:
    """Where ``path`` does not exist it is made, and nothing more is said."""
    try:
        with open(path, "x"):
            pass
    except FileExistsError:
        fray.progress(1, 1)
        return "well"
    time.sleep(60)
    return "never"
