"""Detection of this machine's resources, within its control group and CPU affinity.

All files are read below ``root`` so that tests can describe a machine as a directory tree.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from fray.model.resources import Capacity, Device
from fray.node.containers.engine import find_engine

ROOT = Path("/")
SMI_S = 10.0
METADATA_S = 1.0
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/"
_MAKERS = re.compile(r"nvidia|tesla|geforce|quadro|graphics|device|generation|laptop|gpu")
_UNLIMITED_BYTES = 1 << 60
"""Control groups of version 1 write a huge number where there is no limit."""


def read_capacity(root: Path = ROOT, environ: Mapping[str, str] | None = None, disk_at: str | None = None) -> Capacity:
    """Return CPUs, memory, disk, accelerators and attributes of this machine. Takes milliseconds without accelerators.

    Args:
        disk_at: path on the disk that jobs use; default the temporary directory.
    """
    environ = os.environ if environ is None else environ
    tpus, attributes = tpu_devices(root, environ)
    engine = find_engine(environ)
    if engine is not None:
        attributes["containers"] = engine.kind
    return Capacity(
        cpu_milli=cpu_milli(root, len(os.sched_getaffinity(0))),
        memory_bytes=memory_bytes(root),
        disk_bytes=shutil.disk_usage(disk_at or tempfile.gettempdir()).free,
        devices=(*gpu_devices(root), *tpus),
        attributes=attributes,
    )


def find_devices(root: Path = ROOT, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the ids of the accelerators that the drivers and the kernel list now. Blocks."""
    tpus, _ = tpu_devices(root, os.environ if environ is None else environ)
    return tuple(device.id for device in (*gpu_devices(root), *tpus))


# CPU and memory ------------------------------------------------------------------------------------------------------


def cpu_milli(root: Path, affinity: int) -> int:
    """Return the thousandths of CPUs this process may use: its affinity, or its quota if that is less; at least 1."""
    quotas = [*_quotas_v2(root), *_quotas_v1(root)]
    return max(1, min([affinity * 1000, *quotas]))


def _quotas_v2(root: Path) -> Iterator[int]:
    for group in _groups(root, ""):
        # Limits of all ancestors hold, so the smallest counts.
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            yield int(quota) * 1000 // int(period)


def _quotas_v1(root: Path) -> Iterator[int]:
    for group in _groups(root, "cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            yield quota * 1000 // period


def memory_bytes(root: Path) -> int:
    """Return the memory of the machine, or the limit of the control group if that is less."""
    limits = [_number(group / "memory.max") for group in _groups(root, "")]
    limits += [_number(group / "memory.limit_in_bytes") for group in _groups(root, "memory")]
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES]
    total = re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"))
    return min([int(total[1]) * 1024, *known]) if total else min(known, default=0)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control group and its ancestors; ``controller`` is empty for version 2.

    Inside a container the path may be the host's while only the container's own group is mounted, as the root: hence
    the mount itself comes last.
    """
    mount = root / "sys/fs/cgroup" / controller
    path = _own_group(root, controller)
    while path is not None and path not in ("/", ""):
        yield mount / path.lstrip("/")
        path = os.path.dirname(path)
    yield mount


def _own_group(root: Path, controller: str) -> str | None:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    return None


# Accelerators --------------------------------------------------------------------------------------------------------


def gpu_devices(root: Path = ROOT) -> tuple[Device, ...]:
    """Return the NVIDIA GPUs as ``gpu-0``, ``gpu-1``, … in the driver's own order; none without the driver."""
    if not (root / "proc/driver/nvidia").exists() and not (root / "dev/nvidiactl").exists():
        return ()
    names = _names_by_smi() if root == ROOT else []
    names = names or [
        match[1].strip()
        for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))
        if (match := re.search(r"Model:(.*)", _read(file)))
    ]
    return tuple(Device(f"gpu-{index}", "gpu", gpu_variant(name)) for index, name in enumerate(names))


def _names_by_smi() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def gpu_variant(name: str) -> str:
    """Return ``h100`` for ``NVIDIA H100 80GB HBM3``, ``a100`` for ``NVIDIA A100-SXM4-40GB``, ``rtx4090``, ``t4``, …"""
    words = [word for word in re.split(r"[\s-]+", name.lower()) if word and not _MAKERS.fullmatch(word)]
    if not words:
        return "unknown"
    if words[0] in ("rtx", "gtx") and len(words) > 1:
        return words[0] + words[1]
    return words[0]


def tpu_devices(root: Path, environ: Mapping[str, str]) -> tuple[tuple[Device, ...], dict[str, str]]:
    """Return the TPU chips of this host and the attributes of its slice: ``slice``, ``tpu_worker``, ``zone``, …"""
    chips = len(list(root.glob("dev/accel[0-9]*"))) or _vfio_chips(root)
    if not chips:
        return (), {}
    facts = {key: _tpu_fact(key, root, environ) for key in _TPU_FACTS}
    zone = facts["zone"].rpartition("/")[2]
    attributes = {
        "slice": facts["slice"],
        "tpu_worker": facts["worker"],
        "tpu_type": facts["type"],
        "zone": zone,
        "region": zone.rpartition("-")[0],
    }
    devices = tuple(Device(f"tpu-{index}", "tpu", facts["type"] or "unknown") for index in range(chips))
    return devices, {key: value for key, value in attributes.items() if value}


_TPU_FACTS = {
    "type": ("TPU_ACCELERATOR_TYPE", "attributes/accelerator-type"),
    "slice": ("TPU_NAME", "attributes/instance-id"),
    "worker": ("TPU_WORKER_ID", "attributes/agent-worker-number"),
    "zone": ("TPU_ZONE", "zone"),
}
"""Fact: variable that may hold it, and its path on the machine's metadata server."""


def _vfio_chips(root: Path) -> int:
    """Count the chips of newer TPUs, which are VFIO groups. Other devices may be too, so only on Google's machines."""
    if "Google" not in _read(root / "sys/class/dmi/id/sys_vendor"):
        return 0
    return len(list(root.glob("dev/vfio/[0-9]*")))


def _tpu_fact(key: str, root: Path, environ: Mapping[str, str]) -> str:
    variable, path = _TPU_FACTS[key]
    # The variable first: inside a container the metadata server may not be reachable.
    return environ.get(variable, "") or (_ask_metadata(path) if root == ROOT else "")


def _ask_metadata(path: str) -> str:
    import urllib.error  # only TPU machines need it, and it takes 10 ms of every start
    import urllib.request

    request = urllib.request.Request(_METADATA + path, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=METADATA_S) as answer:
            text: str = answer.read(4096).decode()
            return text.strip()
    except (urllib.error.URLError, OSError, ValueError):
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.lstrip("-").isdigit() else None
