"""Data loaders: items for rollout workers, batch by batch."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fray.errors import InvalidRequest
from fray.rl.core.tasks import TaskOrder
from fray.rl.data import load_rows
from fray.rl.nexrl.nexrl_module import NexRLModule

MOCK_ROWS = 100


class BaseDataLoader(NexRLModule):
    """Source of data items.

    Args:
        config: of the loader.
        is_validate: whether it is for validation.
    """

    def __init__(self, config: Mapping[str, Any], is_validate: bool = False) -> None:
        super().__init__()
        self._config = config
        self._is_validate = is_validate

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items that are left."""

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return one of the items that are left."""

    @abstractmethod
    def get_next_item(self) -> dict[str, Any] | None:
        """Return the next item and remove it; None if there is none at the moment."""

    @abstractmethod
    def is_finished(self) -> bool:
        """Return whether there will be no further item."""

    @abstractmethod
    def can_return_item(self) -> bool:
        """Return whether `get_next_item` would return an item now."""

    @abstractmethod
    def reset(self) -> None:
        """Begin again with the first item."""

    def add_item(self, item: dict[str, Any]) -> None:
        """Add an item behind all others."""
        self.add_item_back(item)

    @abstractmethod
    def add_item_front(self, item: dict[str, Any]) -> None:
        """Add an item in front of all others."""

    @abstractmethod
    def add_item_back(self, item: dict[str, Any]) -> None:
        """Add an item behind all others."""

    def unlock_for_weight_sync(self) -> None:
        """Let the next batch be loaded: the weights for it are in place. Loaders without batches ignore it."""


class RowDataLoader(BaseDataLoader):
    """Loader of rows in the order of `TaskOrder`. May be used by several threads.

    Items are the rows, with ``group_id`` (equal for all repeats of a row) and ``run_id`` (which repeat) where the row
    has no such keys.

    Args:
        config: ``batch_size`` (rows loaded at a time; default all), ``rollout_repeat_n`` (default 1),
            ``keep_batch_order`` (nothing beyond the loaded batch until `unlock_for_weight_sync`; default False),
            ``shuffle`` (default False), ``seed`` (default 0), ``epochs`` (default 1), ``skip_batches`` (default 0).
        is_validate: validation has each row once, in the order of the data.
    """

    def __init__(self, config: Mapping[str, Any], is_validate: bool = False) -> None:
        super().__init__(config, is_validate)
        self.rows = self._load_rows()
        shuffles = bool(config.get("shuffle", False)) and not is_validate
        self._order = TaskOrder(
            rows=len(self.rows),
            batch_rows=min(int(config.get("batch_size") or len(self.rows)), len(self.rows)),
            repeats=1 if is_validate else int(config.get("rollout_repeat_n", 1)),
            epochs=1 if is_validate else int(config.get("epochs", 1)),
            seed=int(config.get("seed", 0)) if shuffles else None,
            skip_batches=0 if is_validate else int(config.get("skip_batches", 0)),
        )
        self._holds_batches = bool(config.get("keep_batch_order", False)) and not is_validate
        self._lock = threading.Lock()
        self.reset()

    @abstractmethod
    def _load_rows(self) -> list[dict[str, Any]]:
        """Return the rows, at least one."""

    def reset(self) -> None:
        with self._lock:
            self._items: deque[dict[str, Any]] = deque()
            self._loaded, self._is_held = 0, False

    def __len__(self) -> int:
        with self._lock:
            return len(self._items) + len(self._later())

    def __getitem__(self, index: int) -> dict[str, Any]:
        with self._lock:
            return [*self._items, *self._later()][index]

    def get_next_item(self) -> dict[str, Any] | None:
        with self._lock:
            if not self._items and not self._is_held and self._order.has_batch(self._loaded):
                self._items.extend(self._batch(self._loaded))
                self._loaded += 1
                self._is_held = self._holds_batches
            return self._items.popleft() if self._items else None

    def is_finished(self) -> bool:
        with self._lock:
            return not self._items and not self._order.has_batch(self._loaded)

    def can_return_item(self) -> bool:
        with self._lock:
            return bool(self._items) or (not self._is_held and self._order.has_batch(self._loaded))

    def add_item_front(self, item: dict[str, Any]) -> None:
        with self._lock:
            self._items.appendleft(item)

    def add_item_back(self, item: dict[str, Any]) -> None:
        with self._lock:
            self._items.append(item)

    def unlock_for_weight_sync(self) -> None:
        with self._lock:
            self._is_held = False

    def _batch(self, number: int) -> list[dict[str, Any]]:
        return [
            {"group_id": task.group_id, "run_id": task.repeat, **self.rows[task.row]}
            for task in self._order.batch(number)
        ]

    def _later(self) -> list[dict[str, Any]]:
        """Return the items of the batches that are not loaded."""
        items, number = [], self._loaded
        while self._order.has_batch(number):
            items += self._batch(number)
            number += 1
        return items


class TorchDataLoader(RowDataLoader):
    """Loader of JSONL and Parquet files: ``data_files``, one or a list. The name is the guide's: no torch is needed."""

    def _load_rows(self) -> list[dict[str, Any]]:
        files = self._config.get("data_files")
        if not files:
            raise InvalidRequest("data.data_files is missing: expected a .jsonl or .parquet file, or a list of them")
        return [row for file in ([files] if isinstance(files, str | Path) else files) for row in load_rows(str(file))]


class MockDataLoader(RowDataLoader):
    """Loader of made-up prompts: ``size`` of them (default 100), or those in the list ``prompts``."""

    def _load_rows(self) -> list[dict[str, Any]]:
        prompts = self._config.get("prompts")
        if prompts is None:
            prompts = [f"prompt {number}" for number in range(int(self._config.get("size", MOCK_ROWS)))]
        return load_rows([{"prompt": str(prompt)} for prompt in prompts])
