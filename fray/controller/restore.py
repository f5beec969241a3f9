"""The scheduler's state out of the store: at the start of a controller, and after an event that it could not handle."""

from __future__ import annotations

from collections.abc import Iterator

from fray.controller.store import Loaded, Store
from fray.errors import ProtocolMismatch, StoreError, Unsupported
from fray.model.messages.session import VERSION
from fray.net.codec import from_json
from fray.scheduler.state.rows import TABLES, SchedulerConfig
from fray.scheduler.state.state import State, StateSettings


def restore_state(store: Store, loaded: Loaded, now: float, rules: SchedulerConfig | None) -> State:
    """Return the scheduler's state as it was last saved.

    Raises:
        StoreError: a row cannot be read.
    """
    # The scheduler's clock must not step back after a restart, whatever the wall clock says: leases are measured by it.
    return State.restore(_rows(store, loaded), max(now, loaded.meta.get("now", 0.0)), rules)


def reload_state(state: State, store: Store, now: float, settings: StateSettings) -> None:
    """Make ``state`` again what was last saved; the time it takes grows with the rows (0.1 s for 1,500 jobs).

    Raises:
        StoreError: the store or a row cannot be read.
    """
    loaded = store.load()
    state.reload(_rows(store, loaded), max(now, loaded.meta.get("now", 0.0)), settings)


def _rows(store: Store, loaded: Loaded) -> Iterator[tuple[str, str, object]]:
    for table, key, text in loaded.rows:
        try:
            yield table, key, from_json(TABLES[table], text)
        except Unsupported as error:
            raise StoreError(
                f"the store {store.path} was written by a later version of Fray: fray {VERSION} does not know a value "
                f"in row {key!r} of {table!r} ({error}). Nothing was changed. Start that version again, or restore a "
                "backup from before the upgrade (fray backup --restore)"
            ) from error
        except (KeyError, ProtocolMismatch) as error:
            # An unreadable row ends the start. To skip it would lose a job that was accepted, or run it twice.
            raise StoreError(
                f"the store {store.path} is damaged: row {key!r} of {table!r} cannot be read ({error}). "
                "Nothing was changed. Restore a copy of the directory, or pass another --store directory"
            ) from error
