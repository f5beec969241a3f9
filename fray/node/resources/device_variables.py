"""Environment variables by which libraries see the devices an attempt was granted, and no others. Pure.

======  =================================  ====================================================================
kind    granted                            not granted, on a machine that has some
======  =================================  ====================================================================
gpu     ``CUDA_VISIBLE_DEVICES=0,3``       ``CUDA_VISIBLE_DEVICES=`` (empty: none)
tpu     all of the host: no variables      ``TPU_VISIBLE_CHIPS=``, ``TPU_VISIBLE_DEVICES=``, ``JAX_PLATFORMS=cpu``
tpu     some: chips and their bounds       as above
======  =================================  ====================================================================

``CUDA_DEVICE_ORDER=PCI_BUS_ID`` is set with these, as CUDA's own order is by speed and the inventory's by place on the
bus. A whole TPU host is left to what libtpu finds by itself, as a slice of several hosts needs it. For a part of a
host, libtpu needs the chips (``TPU_VISIBLE_CHIPS``; older ones ``TPU_VISIBLE_DEVICES``), how they lie
(``TPU_CHIPS_PER_PROCESS_BOUNDS``, older ``TPU_CHIPS_PER_HOST_BOUNDS``), and that the process is alone
(``TPU_PROCESS_BOUNDS``, older ``TPU_HOST_BOUNDS``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

CHIP_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
"""Layout of so many chips of one host, as libtpu writes it."""
_ALONE = "1,1,1"


def device_variables(granted: Iterable[str], offered: Mapping[str, int]) -> dict[str, str]:
    """Return the variables of the table in the module's docstring.

    Args:
        granted: ids of devices (``gpu-0``).
        offered: number of devices of each kind on the machine.
    """
    numbers = _numbers(granted)
    found = {}
    if offered.get("gpu"):
        # Also if none was granted: without the variable CUDA shows all GPUs of the machine.
        found["CUDA_VISIBLE_DEVICES"] = ",".join(numbers.get("gpu", ()))
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if offered.get("tpu"):
        found.update(_tpu(numbers.get("tpu", []), offered["tpu"]))
    return found


def _numbers(granted: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for device in granted:
        kind, _, number = device.partition("-")
        found.setdefault(kind, []).append(number)
    return found


def _tpu(chips: list[str], of: int) -> dict[str, str]:
    if len(chips) == of:
        return {}
    visible = ",".join(chips)
    found = {"TPU_VISIBLE_CHIPS": visible, "TPU_VISIBLE_DEVICES": visible}
    if not chips:
        # JAX would try the TPU first where libtpu is installed.
        return {**found, "JAX_PLATFORMS": "cpu"}
    bounds = CHIP_BOUNDS.get(len(chips))
    # A number of chips without a known layout: libtpu decides.
    if bounds is None:
        return found
    return {
        **found,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_CHIPS_PER_HOST_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": _ALONE,
        "TPU_HOST_BOUNDS": _ALONE,
    }
