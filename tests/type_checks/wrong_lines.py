"""Lines that are wrong, each with what the checkers say: ``# mypy: text``, ``# pyright: text``; without: nothing."""

from __future__ import annotations

from typing import cast

import fray
import fray.aio
import fray.blocking
from fray import ActorHandle, Entrypoint, Job, JobRequest, v2
from tests.type_checks.right_lines import Counter, fetch, square


class Other:
    def add(self, k: int) -> int:
        return k


# Calls -------------------------------------------------------------------------------------------------------------


async def calls(counter: ActorHandle[Counter]) -> None:
    await counter.ad(3)  # mypy: Actor "Counter" has no public method "ad"; maybe 'add'?
    await counter.add("x")  # mypy: has incompatible type "str"; expected "int"
    await counter.add()  # mypy: Missing positional argument "k"
    await counter._add(3)  # mypy: Actor "Counter" has no public method "_add"; maybe 'add'?
    await counter.n(3)  # mypy: Actor "Counter" has no public method "n"
    counter.add.start("x")  # mypy: has incompatible type "str"; expected "int"
    counter.add.stream(3)  # mypy: Invalid self argument
    await counter.call(Counter.ad, 3)  # mypy: has no attribute "ad" # pyright: Cannot access attribute "ad"
    await counter.call(Counter.add, "x")  # mypy: No overload variant # pyright: parameter "k" of type "int"
    await counter.call(Counter.add)  # mypy: No overload variant # pyright: Argument missing for parameter "k"
    await counter.call(Other.add, 3)  # mypy: No overload variant # pyright: cannot be assigned to parameter "method"
    counter.call.start(Counter.add, "x")  # mypy: No overload variant # pyright: parameter "k" of type "int"
    counter.call.stream(Counter.add, 3)  # mypy: No overload variant # pyright: No overloads for "stream"
    other: ActorHandle[Other] = counter  # mypy: Incompatible types in assignment # pyright: is not assignable
    print(other)


async def constructors(scope: fray.Scope, host: fray.ActorHost) -> None:
    await scope.create_actor(Counter, "oops")  # mypy: Argument 1 to "create_actor" # pyright: parameter "start"
    await scope.create_actor(Counter, "oops", name="x")  # mypy: incompatible type "str" # pyright: No overloads for
    await scope.create_actor(Counter)  # mypy: Too few arguments # pyright: Argument missing for parameter "start"
    await scope.create_actor(Counter, strt=10)  # mypy: No overload variant # pyright: No parameter named "strt"
    await scope.create_actor(Counter, 10, nme="x")  # mypy: Unexpected keyword argument "nme" # pyright: named "nme"
    await scope.create_actor(Counter, name="x")  # mypy: Missing positional argument "start"
    await scope.create_actor(Counter, strt=10, name="x")  # mypy: Unexpected keyword argument "strt" for "Counter"
    await scope.create_actor_group(Counter, "oops", count=3)  # mypy: incompatible type # pyright: No overloads for
    await scope.create_actor_group(Counter, strt=10, count=3)  # mypy: Unexpected keyword argument "strt"
    await host.create_actor(Counter, "oops")  # mypy: Argument 1 to "create_actor" # pyright: parameter "start"
    await host.create_actors(Counter, "oops", count=3)  # mypy: incompatible type # pyright: No overloads for
    fray.child(Counter, "oops")  # mypy: Argument 1 to "child" # pyright: parameter "start"


async def jobs(scope: fray.Scope) -> None:
    await scope.run(square, "x")  # mypy: Argument 1 to "run" # pyright: parameter "x" of type "int"
    await scope.run(fetch, "x")  # mypy: Argument 1 to "run" # pyright: parameter "x" of type "int"
    await scope.run(square, 3, name=3)  # mypy: Argument 1 to "run" # pyright: No overloads for "run"
    await scope.run(square, x="x", name="job")  # mypy: Argument 1 to "square" has incompatible type "str"
    Entrypoint.from_callable(square, args=("x",))  # mypy: incompatible type # pyright: No overloads for
    Entrypoint.from_callable(square, args=(1, 2, 3))  # mypy: incompatible type # pyright: No overloads for
    Entrypoint.from_callable(square)  # mypy: incompatible type # pyright: No overloads for
    Entrypoint.from_callable(square, args=["x"])
    JobRequest("square", entrypoint=square)  # mypy: Argument "entrypoint" # pyright: Extra parameter "x"
    job: Job[str] = await scope.launch(_square_request())  # mypy: Argument 1 to "launch" # pyright: is not assignable
    print(await job + 1)  # mypy: Unsupported operand types # pyright: Operator "+" not supported


def _square_request() -> JobRequest[int]:
    return JobRequest("square", entrypoint=Entrypoint.from_callable(square, args=(3,)))


def pools(pool: fray.WorkerPool, blocking: fray.blocking.WorkerPool) -> None:
    pool.submit(square, "x")  # mypy: No overload variant # pyright: parameter "x" of type "int"
    pool.map(square, ["x"])  # mypy: Argument 1 to "map" # pyright: No overloads for
    blocking.submit(fetch, "x")  # mypy: No overload variant # pyright: parameter "x" of type "int"


def sync_code(counter: fray.blocking.ActorHandle[Counter], scope: fray.blocking.Scope) -> None:
    counter.ad(3)  # mypy: Actor "Counter" has no public method "ad"; maybe 'add'?
    counter.add("x")  # mypy: has incompatible type "str"; expected "int"
    counter.add.remote("x")  # mypy: has incompatible type "str"; expected "int"
    counter.add(3) + "x"  # mypy: Unsupported operand types
    counter.call(Counter.ad, 3)  # mypy: has no attribute "ad" # pyright: Cannot access attribute "ad"
    counter.call(Counter.add, "x")  # mypy: No overload variant # pyright: parameter "k" of type "int"
    counter.call(Counter.add, 3) + "x"  # mypy: Unsupported operand types # pyright: Operator "+" not supported
    scope.create_actor(Counter, "oops")  # mypy: Argument 1 to "create_actor" # pyright: parameter "start"
    scope.run(square, "x")  # mypy: Argument 1 to "run" # pyright: parameter "x" of type "int"


async def asyncio_code(counter: fray.aio.ActorHandle[Counter], scope: fray.aio.Scope) -> None:
    await counter.ad(3)  # mypy: Actor "Counter" has no public method "ad"; maybe 'add'?
    await counter.add("x")  # mypy: has incompatible type "str"; expected "int"
    await counter.add(3) + "x"  # mypy: Unsupported operand types
    await counter.call(Counter.ad, 3)  # mypy: has no attribute "ad" # pyright: Cannot access attribute "ad"
    await counter.call(Counter.add, "x")  # mypy: No overload variant # pyright: parameter "k" of type "int"
    await counter.call(Counter.add, 3) + "x"  # mypy: Unsupported operand types # pyright: Operator "+" not supported
    await scope.create_actor(Counter, "oops")  # mypy: Argument 1 to "create_actor" # pyright: parameter "start"
    await scope.run(square, "x")  # mypy: Argument 1 to "run" # pyright: parameter "x" of type "int"


def lite_code(client: v2.Client, on_fray: v2.FrayClient) -> None:
    counter = client.create_actor(Counter, "oops", name="counter")  # mypy: Argument 1 to "Counter"
    on_fray.create_actor(Counter, strt=10, name="counter")  # mypy: Unexpected keyword argument "strt" for "Counter"
    client.create_actor_group(Counter, name="counter", count=3)  # mypy: Missing positional argument "start"
    counter.ad.remote(3)  # mypy: Actor "Counter" has no public method "ad"; maybe 'add'?
    counter.add.remote("x")  # mypy: has incompatible type "str"; expected "int"
    other: v2.ActorHandle[Other] = counter  # mypy: Incompatible types in assignment # pyright: is not assignable
    other.add(3)


# The handle as an object of the class itself: attribute calls that every checker sees, where both return the same -----


class AsyncCounter:
    async def add(self, k: int) -> int:
        return k


async def as_the_class(handle: ActorHandle[AsyncCounter], blocking: fray.blocking.ActorHandle[Counter]) -> None:
    counter = cast(AsyncCounter, handle)
    await counter.ad(3)  # mypy: has no attribute "ad" # pyright: Cannot access attribute "ad"
    await counter.add("x")  # mypy: incompatible type "str" # pyright: parameter "k" of type "int"
    await counter.add(3) + "x"  # mypy: Unsupported operand types # pyright: Operator "+" not supported
    sync_counter = cast(Counter, blocking)
    sync_counter.ad(3)  # mypy: has no attribute "ad" # pyright: Cannot access attribute "ad"
    sync_counter.add("x")  # mypy: incompatible type "str" # pyright: parameter "k" of type "int"
