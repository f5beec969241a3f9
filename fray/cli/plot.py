"""Plot of utilisation and shares over time, made by matplotlib (the extra ``plot``)."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from fray.errors import InvalidRequest
from fray.model.messages.usage import UsageInfo, UsageSample

KINDS = (".svg", ".png", ".pdf")


def check_plot(file: str) -> None:
    """Raise InvalidRequest if the file has another suffix, or matplotlib is not installed."""
    if Path(file).suffix.lower() not in KINDS:
        raise InvalidRequest(f"--plot {file!r}: expected a file that ends in {', '.join(KINDS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidRequest("--plot needs matplotlib: pip install 'fray[plot]'") from None


def plot(found: UsageInfo, file: str) -> None:
    """Draw two charts above each other with one time axis: utilisation, and the users' shares."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = found.samples
    minutes = [(sample.at - samples[0].at) / 60 for sample in samples]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(10, 7), layout="constrained")
    for name in _names([sample.utilisation for sample in samples]):
        above.plot(
            minutes, [sample.utilisation.get(name, 0.0) for sample in samples], drawstyle="steps-post", label=name
        )
    above.set(ylabel="in use", ylim=(0, 1.05), title="utilisation of the cluster, and shares of its users")
    _mark_waiting(above, minutes, samples)
    users = sorted(_names([sample.shares for sample in samples]))
    heights = [[sample.shares.get(user, 0.0) for sample in samples] for user in users]
    if users:
        labels = [user or "others" for user in users]
        below.stackplot(minutes, *heights, labels=labels, step="post", baseline="zero")
    below.set(ylabel="dominant share", xlabel="minutes")
    for axes in (above, below):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", fontsize="small", ncols=4)
        axes.grid(alpha=0.3)
    figure.savefig(file)
    pyplot.close(figure)


def _mark_waiting(axes: Any, minutes: list[float], samples: tuple[UsageSample, ...]) -> None:
    """Draw a grey background where jobs wait: there utilisation should be high."""
    label = "jobs wait"
    for (since, sample), (until, _) in pairwise(zip(minutes, samples, strict=True)):
        if sample.waiting:
            axes.axvspan(since, until, color="0.9", zorder=0, label=label)
            label = "_"  # once in the legend


def _names(found: list[dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for sample in found for name in sample))
