"""Cells of a notebook: output of a job belongs to the cell that launched it, other output to the running one.

The kernel (ipykernel) keeps the cell to which a task's output belongs in context variables. A job prints later, and in
tasks and threads of Fray: these variables are kept with the launch, and set again where the lines are printed. Without
the variables the kernel shows output in the cell that runs now.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeAlias

from fray.model.ids import JobId

Cell: TypeAlias = tuple[tuple[ContextVar[Any], Any], ...]
"""Variables of one cell with their values."""

KERNEL = "ipykernel"
"""Package that is imported in a kernel of Jupyter."""
VARIABLES = frozenset({"parent_header", "shell_parent", "shell_parent_ident"})
"""Names of the variables of ipykernel: of its streams, of ``display`` and of the shell."""
LAUNCHES_LIMIT = 10_000
"""Launches of which the cell is known; output of jobs launched before these is shown in the running cell."""

_cells: OrderedDict[JobId, Cell] = OrderedDict()


def is_notebook() -> bool:
    """Return whether this process is a kernel of Jupyter."""
    return KERNEL in sys.modules


def remember_launch(job_ids: Iterable[JobId]) -> None:
    """Note that the running cell launches these jobs."""
    cell = tuple((variable, value) for variable, value in copy_context().items() if variable.name in VARIABLES)
    for job_id in job_ids:
        _cells[job_id] = cell
        if len(_cells) > LAUNCHES_LIMIT:
            _cells.popitem(last=False)


def enter_cell_of(job_id: JobId) -> None:
    """Show what this task prints from now on, and what it starts, in the cell that launched the job."""
    for variable, value in _cells.get(job_id, ()):
        variable.set(value)


def run_in_cell_of(job_id: JobId, fn: Callable[..., object], *args: object) -> None:
    """Call ``fn(*args)``, whose output is shown in the cell that launched the job."""
    if job_id not in _cells:
        fn(*args)
        return
    context = copy_context()
    context.run(enter_cell_of, job_id)
    context.run(fn, *args)


def context_without_cell() -> Context:
    """Return a copy of the present context for tasks that outlive the running cell."""
    context = copy_context()
    if not is_notebook():
        return context
    without = Context()
    for variable, value in context.items():
        if variable.name not in VARIABLES:
            without.run(variable.set, value)
    return without
