"""Examples of training and inference: the model, and both examples on each kind of cluster."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.core import url_to_fs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import inference
import language_model as model
import training


def test_decoding_inverts_encoding_except_for_other_characters() -> None:
    assert model.decode(model.encode("def f(x):\n  return x~")) == "def f(x):\n  return x~"
    assert model.decode(model.encode("é\t\x00")) == "???"


def test_gradients_match_numerical_differences() -> None:
    weights = {name: value.astype(np.float64) for name, value in model.fresh(1).items()}
    seen, answers = next(model.batches(model.encode("some text to learn from, " * 9), 8, 0, 0))
    _, gradients = model.loss_and_gradients(weights, seen, answers)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    for name, value in weights.items():
        place = tuple(int(rng.integers(0, size)) for size in value.shape)
        losses = []
        for difference in (1e-6, -1e-6):
            changed = {**weights, name: value.copy()}
            changed[name][place] += difference
            losses.append(model.loss_and_gradients(changed, seen, answers)[0])  # type: ignore[arg-type]
        assert gradients[name][place] == pytest.approx((losses[0] - losses[1]) / 2e-6, abs=1e-6), name


def test_batches_do_not_depend_on_the_first_step() -> None:
    text = model.encode("abcdefghijklmnopqrstuvwxyz" * 5)
    whole = list(islice(model.batches(text, 4, 7, 0), 6))
    rest = list(islice(model.batches(text, 4, 7, 3), 3))
    for one, other in zip(whole[3:], rest, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    storage, root = url_to_fs(str(tmp_path))
    assert model.load(storage, f"{root}/checkpoint.npz") is None
    state = model.state_of(model.fresh(0))
    model.save(storage, f"{root}/checkpoint.npz", state, 12)
    found = model.load(storage, f"{root}/checkpoint.npz")
    assert found is not None
    assert found[1] == 12
    assert all(np.array_equal(found[0][name], value) for name, value in state.items())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.npz"]


def train(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert training.main([*argv, "--batch", "64", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])  # type: ignore[no-any-return]


def test_training_on_threads_continues_when_it_is_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = [*("--steps", "300", "--fail-at", "150"), *("--output", str(tmp_path / "broken"))]
    with pytest.raises(RuntimeError, match="run again with the same --output"):
        training.main([*broken, "--batch", "64"])
    again = train(capsys, *broken)
    assert [attempt["from_step"] for attempt in again["attempts"]] == [0, 100]
    losses = [point["loss"] for point in again["losses"]]
    assert losses[-1] < 0.8 * losses[0]
    assert losses[-1] < 0.55 * np.log(model.SYMBOLS)


def test_training_restarts_when_its_process_is_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = train(capsys, "--steps", "200", "--output", str(tmp_path / "plain"))
    options = ["--client", "machine", "--steps", "200", "--fail-at", "150", "--output", str(tmp_path / "killed")]
    killed = train(capsys, *options, "--rate", "0.003")
    assert [attempt["from_step"] for attempt in killed["attempts"]] == [0, 100]
    assert len({attempt["pid"] for attempt in killed["attempts"]}) == 2
    assert [point["loss"] for point in killed["losses"]] == pytest.approx([point["loss"] for point in plain["losses"]])


@pytest.mark.parametrize("cluster", ["local", "machine"])
def test_every_request_is_answered_while_a_server_is_killed(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cluster", cluster, "--kill-server", "--servers", "2", "--seconds", "0.5", "--json"]
    assert inference.main(options) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["failed"] == []
    assert len(report["answered"]) == (3 if cluster == "local" else 2)
    assert report["killed"] == ("another job took its place" if cluster == "local" else "its job restarted")


@pytest.mark.parametrize(
    ("main", "argv", "message"),
    [
        (training.main, ["--steps", "0"], "--steps and --batch must be 1 or more"),
        (inference.main, ["--servers", "0"], "--servers and --callers must be 1 or more"),
        (inference.main, ["--servers", "1", "--kill-server"], "--kill-server needs --servers 2 or more"),
    ],
)
def test_invalid_options_are_refused(
    main: Any, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err
