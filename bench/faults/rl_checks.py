"""Checks of a run that has ended: each step once, nothing trained twice, no token too old or of a lost line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fray.rl.checkpoint import RECORD_FILE, load_record
from fray.rl.core.journal import BatchTaken, BatchTrained, SamplesAccepted
from fray.rl.core.trajectory_store import Sample
from fray.rl.core.versions import VersionLine
from fray.rl.journal_file import read_journal
from fray.rl.records.console_lines import is_validation


def broken_promises(
    output: Path, status: dict[str, Any], steps: int, batch: int, max_age: int, validate_freq: int | None = None
) -> Iterator[str]:
    """Yield what a run has done that it must not do.

    Args:
        output: its directory; it has all checkpoints.
        status: its last status.
        steps: updates that it had to do.
        batch: samples of each.
        max_age: updates by which a token may be behind.
        validate_freq: updates between two validations; None: it has none.
    """
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    lines = [row for row in rows if not is_validation(row)]
    validated = [row["step"] for row in rows if is_validation(row)]
    if validated != list(range(validate_freq, steps + 1, validate_freq) if validate_freq else ()):
        yield f"validations after {[int(step) for step in validated]}"
    if [line["step"] for line in lines] != list(range(1, steps + 1)):
        yield f"steps {[int(line['step']) for line in lines]}"
        return
    dropped = sum(status["dropped"].values())
    if status["issued"] != status["trained"] + status["validated"] + dropped + status["open"]:
        yield f"the sum of samples does not hold: {status}"
    if status["trained"] != steps * batch:
        yield f"{status['trained']} samples trained in {steps} updates of {batch}"
    yield from _broken_in_batches(output, lines, max_age)


def _broken_in_batches(output: Path, lines: list[dict[str, Any]], max_age: int) -> Iterator[str]:
    checkpoints = output / "checkpoints"
    forks = load_record(checkpoints / f"global_step_{len(lines)}").weights.line.forks
    known: dict[str, Sample] = {}
    trained: set[str] = set()
    for step, line in enumerate(lines, 1):
        # The samples of the pool at a checkpoint were accepted in journals that a rewind may have removed.
        if (checkpoints / f"global_step_{step - 1}" / RECORD_FILE).exists():
            record = load_record(checkpoints / f"global_step_{step - 1}")
            known |= {sample.sample_id: sample for sample in record.store.samples}
        taken: list[str] = []
        count = 0
        for entry in read_journal(output / "rollouts" / f"step_{step}"):
            match entry:
                case SamplesAccepted(samples, _):
                    known |= {sample.sample_id: sample for sample in samples}
                case BatchTaken(ids, _):
                    taken = list(ids)
                case BatchTrained():
                    count += 1
        if count != 1:
            yield f"update {step} was trained {count} times in the journal"
        if twice := trained & set(taken):
            yield f"update {step} trains {sorted(twice)} a second time"
        trained |= set(taken)
        before = VersionLine(forks[: int(line["line"]) + 1], step - 1)
        for name in taken:
            age = before.age(known[name].segments)
            if age is None or age > max_age:
                yield f"update {step} of line {line['line']:g} trains {name} with tokens of {known[name].segments}"
