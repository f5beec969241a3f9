"""Ranks of a data-parallel trainer: each computes parts of every batch, and all do the same step."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fray.rl.train.errors import RankLost

T = TypeVar("T")
stores: Any = dist
"""`torch.distributed`, whose stores type checkers do not find."""
LIMIT = timedelta(minutes=30)
"""Longest wait of a rank for the others in one exchange: they may have the parts of a batch that take longest. The end
of a process is noticed at once, by its connections."""
SIOCGIFADDR = 0x8915
"""Request of Linux for the address of a network interface."""


class Ranks:
    """Processes of a group of `torch.distributed` with the same model, which get the same batches in the same order.

    `torch.distributed.init_process_group`, or `connect`, is called before the first use, and may be called later than
    this is made. Exchanges raise `RankLost` when a process of the group has ended, or does not answer.

    Args:
        group: of processes; None: all of them.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group

    @property
    def index(self) -> int:
        """Number of this process, from 0."""
        return int(dist.get_rank(self._group))

    @property
    def size(self) -> int:
        """Number of processes."""
        return int(dist.get_world_size(self._group))

    def own(self, parts: Sequence[T]) -> Sequence[T]:
        """Return the parts of a batch that this rank computes; none if there are fewer parts than ranks."""
        return parts[self.index :: self.size]

    def row_limit(self, rows: int, limit: int | None) -> int:
        """Return the most rows of a part, so that there is one for each rank."""
        share = -(-rows // self.size)
        return share if limit is None else min(share, limit)

    def gather(self, values: T) -> list[T]:
        """Return the values of all ranks, in the order of the ranks."""
        found: list[Any] = [None] * self.size
        with _exchange():
            dist.all_gather_object(found, values, group=self._group)
        return found

    def add(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over the ranks; return it."""
        with _exchange():
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients by their sums over the ranks, in one message."""
        every = list(parameters)
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in every]
        whole = self.add(torch.cat([grad.flatten() for grad in grads]))
        for one, grad in zip(every, torch.split(whole, [grad.numel() for grad in grads]), strict=True):
            one.grad = grad.view_as(one)


@contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    # That is all that `torch.distributed` says of a peer that has ended, and of one that is too late.
    except RuntimeError as error:
        raise RankLost(f"the ranks of the trainer lost each other: {error}") from error


class Meeting:
    """Place at which ranks find each other, and which the first one opens.

    Args:
        directory: for a file, where all ranks are on this machine.
        host: of this machine, as the others reach it; None: all ranks are here.
        size: number of ranks.

    Attributes:
        address: for `connect` of the other ranks: the path of the file, or ``HOST:PORT``.
    """

    def __init__(self, directory: Path, host: str | None, size: int) -> None:
        self.store: Any
        if host is None:
            self.address = str(directory / "ranks")
            self.store = stores.FileStore(self.address, size)
        else:
            self.store = stores.TCPStore(host, 0, size, is_master=True, timeout=LIMIT, wait_for_workers=False)
            self.address = f"{host}:{self.store.port}"


def backend_of(device: str) -> str:
    """Return the backend of `torch.distributed` for tensors of a device; Python objects go by gloo."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


def connect(meeting: Meeting | str, index: int, size: int, host: str, device: str = "cpu") -> None:
    """Make this process one of the ranks; it returns when all are connected.

    Args:
        meeting: that this rank opened, or its address.
        index: of this rank.
        size: number of ranks.
        host: of this machine, as the other ranks reach it.
        device: on which each rank computes; of ``cuda``, each has a GPU of its own.

    Raises:
        RankLost: they are not connected within `LIMIT`, or one has ended.
    """
    if (interface := _interface_of("127.0.0.1" if _is_file(meeting) else host)) is not None:
        # Else gloo takes the address to which the name of the machine resolves, which may be any.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not _is_file(meeting):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    with _exchange():
        dist.init_process_group(
            backend_of(device), store=_store_of(meeting, size), rank=index, world_size=size, timeout=LIMIT
        )


def _is_file(meeting: Meeting | str) -> bool:
    return (meeting if isinstance(meeting, str) else meeting.address).startswith("/")


def _store_of(meeting: Meeting | str, size: int) -> Any:
    if isinstance(meeting, Meeting):
        return meeting.store
    if _is_file(meeting):
        return stores.FileStore(meeting, size)
    host, _, port = meeting.rpartition(":")
    return stores.TCPStore(host, int(port), size, is_master=False, timeout=LIMIT)


def _interface_of(host: str) -> str | None:
    """Return the network interface with the address of a host; None: it is not known."""
    try:
        wanted = socket.gethostbyname(host.strip("[]"))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address of this family
            if socket.inet_ntoa(found[20:24]) == wanted:
                return name
    return None
