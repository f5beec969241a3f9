"""Uploaded reward functions run in a child process: scores, errors by sample, limits, what they cannot see."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fray.tinker.rewards.uploaded import RewardError, UploadedReward, check_upload

SHARE = """
def share(data_source, solution_str, ground_truth, extra_info, **kw):
    print("a line that is not an answer")
    right = sum(a == b for a, b in zip(solution_str, ground_truth))
    return {"score": right / len(ground_truth)} if data_source == "dict" else right / len(ground_truth)
"""


def test_scores_are_numbers_or_dicts(tmp_path: Path) -> None:
    reward = UploadedReward("share", SHARE, tmp_path)
    assert reward.scores([("digits", "407$", "407$", None), ("dict", "40", "4077", {"a": [1]})]) == [1.0, 0.5]
    assert reward.scores([]) == []
    reward.close()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("def f(:", "SyntaxError"),
        ("def g(*a): return 1", "the source defines no function 'f'"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import os; os._exit(7)", "its process ended with status 7"),
    ],
)
def test_a_source_that_cannot_be_executed_is_refused(source: str, error: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError) as caught:
        UploadedReward("f", source, tmp_path)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return 1 if s == 'a' else 1 / 0", "reward function 'f' for sample 1: ZeroDivisionError"),
        ("return 1 if s == 'a' else 'much'", "for sample 1: ValueError"),
        ("return 1 if s == 'a' else None", "for sample 1: TypeError"),
        ("return 1 if s == 'a' else float('nan')", "the score is nan; expected a finite number"),
        ("import os; os._exit(9)", "its process ended with status 9"),
        ("return len(bytearray(1 << 40))", "for sample 0: MemoryError"),
    ],
)
def test_an_error_names_the_sample_and_the_next_batch_is_scored(body: str, error: str, tmp_path: Path) -> None:
    reward = UploadedReward("f", f"def f(d, s, g, e):\n    if d == 'good': return 2\n    {body}", tmp_path)
    with pytest.raises(RewardError) as caught:
        reward.scores([("", "a", "", None), ("", "b", "", None)])
    assert error in str(caught.value)
    assert reward.scores([("good", "", "", None)]) == [2.0]
    reward.close()


def test_a_function_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    source = """
import os, subprocess, sys
def f(d, s, g, e):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    open("pid", "w").write(str(child.pid))
    while True: pass
"""
    reward = UploadedReward("f", source, tmp_path, timeout_s=2)
    with pytest.raises(RewardError, match="no answer after 2 s; its process was killed"):
        reward.scores([("", "", "", None)])
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and b"State:\tZ" not in Path(f"/proc/{pid}/status").read_bytes():
        assert time.monotonic() < deadline, "what the function started is still running"


def test_uploaded_code_sees_no_variables_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAY_TOKEN", "secret")
    source = "import os\ndef f(d, s, g, e): return float('FRAY_TOKEN' in os.environ)"
    reward = UploadedReward("f", source, tmp_path)
    assert reward.scores([("", "", "", None)]) == [0.0]
    reward.close()


@pytest.mark.parametrize("name", ["", "a b", "1f", "__import__", "a.b", None, 7])
def test_a_name_that_no_function_can_have_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match="function_name: expected the name of a function"):
        check_upload(name, "")
