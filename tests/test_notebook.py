"""Notebooks, with real kernels: cells in which output appears, what objects show, interrupts, and the page of docs/."""

from __future__ import annotations

import copy
import os
import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from attrs import Factory, define
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

PAGE = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
WITHIN_S = 60.0
SPECS = ["local", "machine?nodes=1"]
SETUP = """
import os, sys, time
import fray.blocking as fray
from fray.blocking import Entrypoint, JobRequest, ResourceConfig
TINY = ResourceConfig.with_cpu(cpu=0.1, memory="50MB")
def request(name, fn, *args): return JobRequest(name, TINY, Entrypoint.from_callable(fn, args=args))
def say(word, path=None):
    while path and not os.path.exists(path): time.sleep(0.02)
    print(word)
    print(word, "as error", file=sys.stderr)
    return word
cluster = fray.open_cluster({spec!r})
"""


@define
class CellRun:
    """One execution of a cell: what the kernel has published with it as parent, also after its end."""

    ended: bool = False
    outputs: list[dict[str, Any]] = Factory(list)
    at_end: int = 0
    """Number of outputs when the cell had ended."""

    def text(self, stream: str, *, at_end: bool = False) -> list[str]:
        """Return the lines of a stream, without the prefix with the job's name."""
        outputs = self.outputs[: self.at_end] if at_end else self.outputs
        text = "".join(output["text"] for output in outputs if output.get("name") == stream)
        return [re.sub(r"^\(\S+\) ", "", line) for line in text.splitlines()]

    @property
    def error(self) -> str:
        return next((f"{output['ename']}: {output['evalue']}" for output in self.outputs if "ename" in output), "")

    @property
    def shown(self) -> dict[str, str]:
        return next((output["data"] for output in self.outputs if "data" in output), {})


class Kernel:
    """Real kernel of Jupyter, and the outputs of each of its cells."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WITHIN_S)
        self.runs: dict[str, CellRun] = {}

    def start(self, code: str) -> CellRun:
        run = CellRun()
        self.runs[self.client.execute(code)] = run
        return run

    def run(self, code: str) -> CellRun:
        """Run a cell to its end."""
        run = self.start(code)
        while not run.ended:
            self.receive()
        return run

    def run_well(self, code: str) -> CellRun:
        run = self.run(code)
        assert run.error == "", run.outputs
        return run

    def receive(self) -> None:
        """Receive one message of the kernel."""
        try:
            message = self.client.get_iopub_msg(timeout=WITHIN_S)
        except queue.Empty:
            raise AssertionError(f"no message of the kernel within {WITHIN_S} s: {self.runs}") from None
        run = self.runs.get(message["parent_header"].get("msg_id", ""))
        if run is None:
            return
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            run.ended, run.at_end = True, len(run.outputs)
        elif message["msg_type"] in ("stream", "error", "execute_result"):
            run.outputs.append(message["content"])

    def wait_text(self, run: CellRun, stream: str, line: str) -> None:
        while line not in run.text(stream):
            self.receive()


@pytest.fixture(scope="module", params=SPECS)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """Kernel with an open cluster."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    try:
        kernel = Kernel(manager)
        kernel.run_well(SETUP.format(spec=request.param))
        yield kernel
        kernel.client.stop_channels()
    finally:
        manager.shutdown_kernel(now=True)


def test_output_of_a_job_is_in_its_cell_before_the_wait_returns(kernel: Kernel) -> None:
    launched = kernel.run_well("print(cluster.launch(request('first', say, 'one')).wait())")
    assert launched.text("stdout", at_end=True) == ["one", "one"]
    assert launched.text("stderr", at_end=True) == ["one as error"]


def test_output_of_a_job_that_a_later_cell_waits_for_is_in_the_cell_that_launched_it(
    kernel: Kernel, tmp_path: Path
) -> None:
    free = str(tmp_path / "free")
    launched = kernel.run_well(f"job = cluster.launch(request('first', say, 'one', {free!r}))")
    between = kernel.run_well("print('between')")
    waited = kernel.run_well(f"open({free!r}, 'w').close(); print(job.wait(), 'waited')")
    kernel.wait_text(launched, "stdout", "one")
    kernel.wait_text(launched, "stderr", "one as error")
    assert between.text("stdout") == ["between"]
    assert waited.text("stdout") == ["one waited"]
    assert (between.text("stderr"), waited.text("stderr")) == ([], [])


def test_output_of_jobs_below_a_job_is_in_the_cell_of_the_job_before_its_wait_returns(kernel: Kernel) -> None:
    kernel.run_well(
        "def parent():\n"
        "    with fray.current_cluster().open_scope('children') as scope:\n"
        "        for number in range(5): scope.launch(request(f'child-{number}', say, f'child {number}'))\n"
    )
    launched = kernel.run_well("cluster.launch(request('parent', parent)).wait()")
    assert sorted(launched.text("stdout", at_end=True)) == [f"child {number}" for number in range(5)]


def test_all_of_many_lines_are_there_when_the_wait_returns(kernel: Kernel) -> None:
    kernel.run_well("def count(n):\n    for number in range(n): print(number)")
    launched = kernel.run_well("cluster.launch(request('count', count, 20_000)).wait()")
    assert launched.text("stdout", at_end=True) == [str(number) for number in range(20_000)]


def test_output_of_an_actor_is_in_the_cell_that_runs(kernel: Kernel) -> None:
    kernel.run_well("class Speaker:\n    def say(self, word): print(word)\n")
    created = kernel.run_well("speaker = cluster.create_actor(Speaker, name='speaker')")
    called = kernel.run_well("speaker.say('one')")
    kernel.wait_text(called, "stdout", "one")
    assert created.text("stdout") == []


def test_an_interrupt_ends_the_wait_and_leaves_the_cluster_usable(kernel: Kernel, tmp_path: Path) -> None:
    free = str(tmp_path / "free")
    kernel.run_well(f"job = cluster.launch(request('held', say, 'one', {free!r})); job.wait_running()")
    # One statement: IPython compiles the next one after it has printed, and cannot show an interrupt of that.
    waiting = kernel.start("if True:\n    print('waits', flush=True)\n    job.wait()\n")
    kernel.wait_text(waiting, "stdout", "waits")
    kernel.manager.interrupt_kernel()
    while not waiting.ended:
        kernel.receive()
    assert waiting.error.startswith("KeyboardInterrupt")
    assert kernel.run_well("print(job.done())").text("stdout") == ["False"]
    assert kernel.run_well("print(cluster.launch(request('next', abs, -7)).wait())").text("stdout") == ["7"]
    assert kernel.run_well(f"open({free!r}, 'w').close(); print(job.wait(), job.info.state)").text("stdout") == [
        "one succeeded"
    ]


def test_an_interrupt_in_a_scope_ends_its_jobs_and_leaves_the_cluster_usable(kernel: Kernel, tmp_path: Path) -> None:
    free = str(tmp_path / "free")
    waiting = kernel.start(
        "with cluster.open_scope('run') as scope:\n"
        f"    held = scope.launch(request('held', say, 'one', {free!r}))\n"
        "    held.wait_running()\n"
        "    print('waits', flush=True)\n"
    )
    kernel.wait_text(waiting, "stdout", "waits")
    kernel.manager.interrupt_kernel()
    while not waiting.ended:
        kernel.receive()
    assert waiting.error.startswith("KeyboardInterrupt")
    assert kernel.run_well("print(held.info.state)").text("stdout") == ["stopped"]
    assert kernel.run_well("print(cluster.launch(request('next', abs, -7)).wait())").text("stdout") == ["7"]
    Path(free).touch()  # a thread of `local` cannot be killed


def test_objects_show_their_state_as_html(kernel: Kernel) -> None:
    shown = kernel.run_well("job = cluster.launch(request('seven', abs, -7)); job.wait(); job").shown
    assert re.fullmatch(r"<Job seven-\w+ succeeded on [\w-]+>", shown["text/plain"])
    assert re.fullmatch(r"<div><b>seven-\w+</b> <span style=.*>succeeded</span> on [\w-]+ </div>", shown["text/html"])
    assert " succeeded" in kernel.run_well("cluster").shown["text/html"]


def test_the_async_api_says_what_to_write_in_a_notebook(kernel: Kernel) -> None:
    failed = kernel.run("import fray\nasync with fray.open_cluster('local') as cluster: pass")
    assert failed.error.startswith("FrayError: fray.open_cluster() was entered outside of Trio")
    assert "with fray.blocking.open_cluster() as cluster:" in failed.error
    assert "async with fray.aio.open_cluster() as cluster:" in failed.error


def test_a_cell_with_the_asyncio_api_has_output_and_html_too(kernel: Kernel) -> None:
    opened = "async with fray.aio.open_cluster('local') as opened:"
    kernel.run_well("import fray.aio")
    done = kernel.run_well(
        f"{opened}\n    job = await opened.launch(request('first', say, 'one'))\n    print(await job, 'waited')\njob"
    )
    assert sorted(done.text("stdout", at_end=True)) == ["one", "one waited"]
    assert "succeeded" in done.shown["text/html"]


@pytest.mark.parametrize("wait", ["job", "asyncio.Event().wait()"])
def test_an_interrupt_of_a_cell_with_the_asyncio_api_ends_its_block(kernel: Kernel, tmp_path: Path, wait: str) -> None:
    free = str(tmp_path / "free")
    kernel.run_well("import asyncio, fray.aio")
    waiting = kernel.start(
        "async with fray.aio.open_cluster('local') as opened:\n"
        f"    job = await opened.launch(request('held', say, 'one', {free!r}))\n"
        "    await job.wait_running()\n"
        # Printed by the loop once the cell waits: then the loop has nothing more to do, and the job prints nothing.
        "    asyncio.get_running_loop().call_soon(lambda: print('waits', flush=True))\n"
        f"    await {wait}\n"
    )
    kernel.wait_text(waiting, "stdout", "waits")
    kernel.manager.interrupt_kernel()
    while not waiting.ended:
        kernel.receive()
    assert waiting.error.startswith("CancelledError")
    assert kernel.run_well("print(cluster.launch(request('next', abs, -7)).wait())").text("stdout") == ["7"]
    Path(free).touch()  # a thread of `local` cannot be killed


def shown(notebook: Any) -> list[list[str]]:
    """Return what each cell shows, with one id for all jobs. Progress lines of Fray on standard error may come late."""
    found = []
    for cell in notebook.cells:
        outputs = [output for output in cell.get("outputs", ()) if output.get("name") != "stderr"]
        texts = [output["text"] if "text" in output else str(sorted(output["data"].items())) for output in outputs]
        found.append([re.sub(r"-[a-z0-9]{12}\b", "-0", text) for text in texts])
    return found


def test_the_cells_of_the_page_show_in_a_kernel_what_they_show_on_the_page(tmp_path: Path) -> None:
    page = nbformat.read(PAGE, as_version=4)
    run = copy.deepcopy(page)
    client = NotebookClient(
        run,
        timeout=int(WITHIN_S),
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    if os.environ.get("FRAY_WRITE_TRANSCRIPTS"):
        run.metadata = page.metadata
        for cell in run.cells:
            if "outputs" in cell:
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(run, PAGE)
        page = run
    assert shown(run) == shown(page)
    assert sum(map(len, shown(page))) >= 8
