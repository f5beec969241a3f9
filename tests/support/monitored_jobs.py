"""Jobs that are watched: what they do is in their names."""

from __future__ import annotations

import ctypes
import http.server
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator

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
    """Block in C with the interpreter lock: no Python code runs in this process until it returns."""
    fray.progress(1, 2)
    ctypes.PyDLL(None).sleep(seconds)


async def wait_in_a_task(seconds: float) -> None:
    async def patient_child() -> None:
        await trio.sleep(seconds)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(patient_child)


def stall_the_first_time(path: str) -> str:
    """Create ``path`` unless it exists, and report nothing more."""
    try:
        with open(path, "x"):
            pass
    except FileExistsError:
        fray.progress(1, 1)
        return "well"
    time.sleep(60)
    return "never"


class Patient:
    """All-sync: its calls share one thread."""

    def __init__(self, path: str = "") -> None:
        self.asked = 0
        self.path = path

    def ping(self) -> None:
        self.asked += 1
        if self.path and os.path.exists(self.path):
            raise ValueError("it hurts")

    def count(self) -> int:
        return self.asked

    def block(self, seconds: float) -> None:
        time.sleep(seconds)

    def stream(self) -> Iterator[int]:
        yield 1


class AsyncPatient:
    """Lives in the loop."""

    async def ping(self) -> None:
        await trio.lowlevel.checkpoint()

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - so that the loop does not turn


def serve_http(path: str) -> None:
    """Answers 200 while there is no file at ``path``, and 503 afterwards."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if os.path.exists(path) else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http.server.HTTPServer(("127.0.0.1", int(os.environ["FRAY_PORT_HTTP"])), Handler).serve_forever()
