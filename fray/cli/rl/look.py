"""``fray rl top``, ``show``, ``replay`` and ``ls``: a look at runs, from the files that they write."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import trio

from fray.cli.formatting import fields, span, table
from fray.cli.output import say, say_json, say_screen, width
from fray.cli.rl.start import check_extra
from fray.errors import InvalidRequest
from fray.monitoring.json_form import plain

SILENT_S = 15.0
"""Age of a status beyond which its run is probably lost."""
AWAY_S = 5.0
"""The same for the controller of a run that works."""
TIMES = ("seconds", "tokens_per_s")
"""Metrics that are not the same twice."""


async def top(options: argparse.Namespace) -> int:
    """Run ``fray rl top``."""
    from fray.rl.records.run_files import STATUS_PERIOD_S, find_output, read_status
    from fray.rl.records.run_owner import LIVING

    output = find_output(options.run)
    while True:
        status = read_status(output)
        if options.json:
            say_json(status)
        else:
            (say if options.once else say_screen)(status_lines(status, time.time()))
        sys.stdout.flush()
        if options.once or status["state"] not in LIVING:
            return 0
        await trio.sleep(STATUS_PERIOD_S)


def status_lines(status: dict[str, Any], now: float) -> list[str]:
    """Return what a run does, in lines: what it waits for, its step, servers, samples and failures."""
    metrics, of = status["metrics"], f" of {status['steps']}" if status.get("steps") else ""
    pairs = [("run", f"{status['name']}, {status['state']}, for {span(_end(status, now) - status['started_at'])}")]
    pairs.append(("job", status.get("job", "")))
    pairs.append(("controller" if _works(status, now) else "silent", _silence(status, now)))
    pairs.append(("error", status["error"]))
    if "issued" in status:
        pairs += [
            ("waits for", status["waits_for"]),
            ("step", f"{status['step']}{of}"),
            ("reward", f"{metrics['reward_mean']:.3f}" if "reward_mean" in metrics else ""),
            ("versions", f"trainer {status['version']}, servers {status['rollout_version']}"),
            ("servers", ", ".join(_server_text(one) for one in status.get("servers", ()))),
            ("samples", _counts_text(status)),
            ("last failure", status["last_failure"].rstrip().rpartition("\n")[2]),
            ("dropped", _reasons_text(status["dropped"])),
            ("repeated", _reasons_text(status["repeated"])),
            ("skipped", _reasons_text(status.get("skipped", {}))),
        ]
    return fields(pairs)


def _works(status: Mapping[str, Any], now: float) -> bool:
    """Return whether the process of data and pool works, whatever the controller does."""
    at = status.get("work_written_at")
    return at is not None and now - at <= AWAY_S


def _silence(status: Mapping[str, Any], now: float) -> str:
    """Return that the controller of a run, or all of it, gives no sign of life; empty if it does."""
    works, silent_s, job = _works(status, now), now - status["written_at"], status.get("job", "")
    if silent_s <= (AWAY_S if works else SILENT_S) or not (works or status["state"] == "running"):
        return ""
    if status["state"] == "pending":
        missing = f"its job has been waiting for {span(silent_s)}"
    else:
        again = "the cluster starts its job again" if job else "started again, it continues"
        missing = f"for {span(silent_s)}: its process {status['pid']} on {status['host']} may be lost; {again}"
    if not works:
        return missing
    since = time.strftime("%H:%M:%S", time.localtime(status["written_at"]))
    goes_on = "episodes and the update under way continue; the next update waits for it"
    return f"silent since {since}, {missing}\nmeanwhile {goes_on}"


def _end(status: dict[str, Any], now: float) -> float:
    from fray.rl.records.run_owner import LIVING

    return now if status["state"] in LIVING else float(status["written_at"])


def _server_text(server: dict[str, Any]) -> str:
    return f"{server['name']} {server['state']} ({server['version'] or 'no version yet'})"


def _counts_text(status: dict[str, Any]) -> str:
    dropped = sum(status["dropped"].values())
    text = f"{status['issued']} issued = {status['trained']} trained + {status['validated']} validated"
    return f"{text} + {dropped} dropped + {status['open']} open"


def _reasons_text(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda one: -one[1]))


async def show(options: argparse.Namespace) -> int:
    """Run ``fray rl show``."""
    from fray.rl.records.run_files import find_output, read_settings_of
    from fray.rl.records.steps import read_step, recorded_steps

    output = find_output(options.run)
    number = options.step
    if number is None:
        done = recorded_steps(output)
        if not done:
            raise InvalidRequest(f"{output} has no finished step yet")
        number = done[-1]
    step = await trio.to_thread.run_sync(read_step, output, number)
    groups = list(step.groups)
    if options.worst is not None:
        groups = sorted(groups, key=lambda group: group.mean_reward)[: options.worst]
    decode = _decoder(read_settings_of(output).model)
    shown = [
        {
            "group_id": group.group_id,
            "mean_reward": group.mean_reward,
            "samples": [_sample(one, decode) for one in group.trajectories],
        }
        for group in groups
    ]
    if options.json:
        say_json({"step": number, "failures": [plain(one) for one in step.failures], "groups": shown})
    else:
        say(_step_lines(number, step.failures, shown, len(step.groups)))
    return 0


def _decoder(model: Any) -> Any:
    from fray.rl.tokenizers import load_tokenizer

    return load_tokenizer(model).decode


def _sample(trajectory: dict[str, Any], decode: Any) -> dict[str, Any]:
    """Return a trajectory as texts; its tokens are split where the first one is trained."""
    tokens, mask = trajectory.get("tokens") or [], list(trajectory.get("loss_mask") or [])
    begin = mask.index(1) if 1 in mask else len(tokens)
    return {
        "task_id": trajectory.get("task_id", ""),
        "run_id": trajectory.get("run_id", 0),
        "reward": trajectory.get("reward"),
        "prompt": trajectory.get("prompt") or decode(list(tokens[:begin])),
        "response": trajectory.get("response") or decode(list(tokens[begin:])),
        "versions": [f"{_version_text(version)} x{count}" for version, count in trajectory.get("versions", ())],
        "finish_reason": trajectory.get("finish_reason", ""),
    }


def _version_text(version: Any) -> str:
    return ".".join(map(str, version)) if isinstance(version, list | tuple) else str(version)


def _step_lines(number: int, failures: Sequence[Any], groups: Sequence[dict[str, Any]], total: int) -> Iterator[str]:
    yield f"step {number}: {total} groups, {len(failures)} failed attempts"
    for failure in failures:
        what = "dropped" if failure.is_dropped else "failed"
        yield f"  task {failure.task_id} {what}: {failure.reason}"
        yield from (f"    {line}" for line in failure.detail.rstrip().splitlines()[-3:])
    for group in groups:
        yield ""
        yield f"group {group['group_id']}: mean reward {group['mean_reward']:.3f}"
        yield f"  prompt {group['samples'][0]['prompt']!r}" if group["samples"] else "  no samples"
        for one in group["samples"]:
            reward = "none" if one["reward"] is None else f"{one['reward']:.3f}"
            yield f"  reward {reward}  {one['response']!r}  versions {', '.join(one['versions']) or 'none'}"


async def replay(options: argparse.Namespace) -> int:
    """Run ``fray rl replay``."""
    check_extra(("torch", "transformers", "safetensors"))
    from fray.rl.records.replay import ReplayedStep
    from fray.rl.records.replay import replay as replay_steps
    from fray.rl.records.run_files import find_output

    output = find_output(options.run)

    def replay_all() -> list[ReplayedStep]:
        return list(replay_steps(output, options.step))

    *before, last = await trio.to_thread.run_sync(replay_all)
    if options.json:
        say_json(last)
        return 0
    rows = [
        [name, f"{value:.6g}", f"{last.recorded[name]:.6g}", "" if value == last.recorded[name] else "differs"]
        for name, value in sorted(last.metrics.items())
        if name in last.recorded and name not in TIMES
    ]
    began = f"continued from step {before[0].number - 1}" if before else f"continued from step {options.step - 1}"
    say([f"step {last.number}, {began}", *table(["METRIC", "REPLAYED", "RECORDED", ""], rows, width())])
    return 0


async def ls(options: argparse.Namespace) -> int:
    """Run ``fray rl ls``."""
    from fray.rl.records.run_files import named_outputs, read_status

    found = [read_status(output) | {"name": name} for name, output in named_outputs()]
    if options.json:
        say_json(found)
        return 0
    rows = [
        [one["name"], _state_text(one), str(one.get("step", 0)), _reward_text(one["metrics"]), one["output"]]
        for one in found
    ]
    say(
        table(["RUN", "STATE", "STEP", "REWARD", "OUTPUT"], rows, width(), optional=("REWARD", "STEP"))
        if rows
        else ["no runs yet"]
    )
    return 0


def _state_text(status: dict[str, Any]) -> str:
    now = time.time()
    return str(status["state"]) if _works(status, now) or not _silence(status, now) else "silent"


def _reward_text(metrics: dict[str, Any]) -> str:
    return f"{metrics['reward_mean']:.3f}" if "reward_mean" in metrics else ""
