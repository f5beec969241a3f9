"""Services of a runtime: attached, or provided and made on first use, from any thread."""

from __future__ import annotations

import threading
import time

import pytest

from fray.model.service_key import ServiceKey
from fray.runtime.services import Services

NAMES: ServiceKey[list[str]] = ServiceKey("names")
SIZES: ServiceKey[list[int]] = ServiceKey("sizes")


def test_a_provided_service_is_made_when_it_is_asked_for_and_not_before() -> None:
    services = Services()
    services.provide(NAMES, lambda: ["made"])
    assert services.get(NAMES) is None
    assert services.find(NAMES) == ["made"]
    assert services.get(NAMES) is services[NAMES] is services.find(NAMES)


def test_an_unknown_service_is_none_or_a_key_error() -> None:
    services = Services()
    assert services.find(NAMES) is services.get(NAMES) is None
    with pytest.raises(KeyError):
        services[NAMES]
    services[NAMES] = ["attached"]
    assert services.find(NAMES) == services.get_or_make(NAMES, list) == ["attached"]


def test_the_factory_of_a_service_may_ask_for_another() -> None:
    services = Services()
    services.provide(NAMES, lambda: ["a", "b"])
    services.provide(SIZES, lambda: [len(name) for name in services[NAMES]])
    assert services[SIZES] == [1, 1]


def test_many_threads_that_ask_at_once_get_one_service() -> None:
    services, made, found = Services(), [], []
    together = threading.Barrier(8)

    def make() -> list[str]:
        time.sleep(0.01)  # long enough for the others to arrive
        made.append(1)
        return ["made"]

    def ask() -> None:
        together.wait()
        found.append(services[NAMES])

    services.provide(NAMES, make)
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
    assert len({id(each) for each in found}) == 1
