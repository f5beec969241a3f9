"""Samples of stacks as a profile, and values of actors that need no code."""

from __future__ import annotations

import datetime
import io
import os
import pickle
import subprocess
from typing import Any

import pytest

from fray.cli.inspection.profile import speedscope, stacks_in
from fray.errors import InvalidRequest
from fray.runtime.serialization import errors, pickling

FAULTHANDLER = """\
Process 4711:
Thread 0x00007f15f8dff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait
  File "/home/ada/train.py", line 7 in load (rows)

Current thread 0x00007f15faeb4740 (most recent call first):
  File "/home/ada/train.py", line 40 in step
  File "/home/ada/train.py", line 88 in <module>

Trio tasks:
task main
    serve (/home/ada/train.py:1)
    wait (/home/ada/train.py:2)
  task worker
      work (/home/ada/train.py:3)
  task worker
      work (/home/ada/train.py:4)
"""
PY_SPY = """\
Process 4711: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4711 (active): "MainThread"
    step (/home/ada/train.py:40)
    <module> (/home/ada/train.py:88)
Thread 4712 (idle): "loader"
    wait (/usr/lib/python3.11/threading.py:320)
"""


def test_stacks_of_faulthandler_and_of_py_spy_are_read() -> None:
    step, module = ("step", "/home/ada/train.py", 40), ("<module>", "/home/ada/train.py", 88)
    assert list(stacks_in(FAULTHANDLER)) == [
        (
            "process 4711 thread 0x00007f15f8dff6c0",
            [("load (rows)", "/home/ada/train.py", 7), ("wait", "/usr/lib/python3.11/threading.py", 320)],
        ),
        ("process 4711 thread 0x00007f15faeb4740", [module, step]),
        ("task main", [("serve", "/home/ada/train.py", 1), ("wait", "/home/ada/train.py", 2)]),
        ("task worker", [("work", "/home/ada/train.py", 3)]),
        ("task worker #2", [("work", "/home/ada/train.py", 4)]),
    ]
    assert list(stacks_in(PY_SPY)) == [
        ("process 4711 thread MainThread", [module, step]),
        ("process 4711 thread loader", [("wait", "/usr/lib/python3.11/threading.py", 320)]),
    ]
    assert list(stacks_in("[fray] not running")) == []
    assert (
        list(stacks_in("Process 1 is not a Python process that can be captured. Its threads:\n    1 sh: state S")) == []
    )


def test_a_sample_stands_for_the_time_until_the_next_one() -> None:
    step, load = ("step", "train.py", 40), ("load", "train.py", 7)
    samples = [(0.0, "main", [load]), (1.0, "main", [step]), (1.5, "other", [step]), (3.0, "main", [load, step])]
    found = speedscope("train", samples, 4.0)
    assert found["shared"]["frames"] == [
        {"name": "load", "file": "train.py", "line": 7},
        {"name": "step", "file": "train.py", "line": 40},
    ]
    main, other = found["profiles"]
    assert (main["name"], main["samples"], main["weights"]) == ("main", [[0], [1], [0, 1]], [1.0, 2.0, 1.0])
    assert (other["startValue"], other["endValue"], other["weights"]) == (1.5, 4.0, [2.5])


class Dangerous:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_values_that_need_code_are_refused_and_plain_ones_and_errors_are_not() -> None:
    dumped = errors.dump_error(subprocess.CalledProcessError(3, "train"))
    plain = {"a": [1, 2.5, None, True, "text", b"bytes"], "at": datetime.date(2026, 1, 2), "set": {1}, "t": (1, 2)}
    with pickling.plain_values_only():
        assert pickling.unpack(pickling.dumps(plain)) == plain
        for dangerous in (Dangerous(), os.getcwd, io.StringIO, Dangerous):
            with pytest.raises(InvalidRequest, match="only plain values are shown"):
                pickling.unpack(pickle.dumps(dangerous))
        error = errors.load_error(errors.dump_error(ValueError("no luck")))
        assert (type(error), str(error)) == (ValueError, "no luck")
        assert "CalledProcessError" in str(errors.load_error(dumped)), "as text"
    assert pickling.unpack(pickle.dumps(os.getcwd)) is os.getcwd, "as before"
