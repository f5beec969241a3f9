"""Pickling of values between user code on both sides, and errors for values that cannot be pickled."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.errors import ActorDied, NotPicklable, RemoteError, RemoteTraceback
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.buffers import PickledObject

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)


@given(plain)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    assert pickling.loads(pickling.dumps(value)) == value


@given(st.lists(plain, max_size=3), st.dictionaries(st.text(min_size=1), plain, max_size=3))
def test_arguments_come_back_as_they_were(args: list[Any], kwargs: dict[str, Any]) -> None:
    data = pickling.pack_call("m", tuple(args), kwargs)
    assert isinstance(data, bytes)
    back, keywords = pickling.loads_call(data, bool(kwargs))
    assert (list(back), dict(keywords)) == (args, kwargs)


def test_closures_travel() -> None:
    secret = 42
    assert pickling.loads(pickling.dumps(lambda: secret))() == 42


def test_the_word_main_in_data_does_no_harm() -> None:
    assert pickling.loads(pickling.dumps({"__main__": "__main__"})) == {"__main__": "__main__"}


def test_functions_of_a_script_are_pickled_by_value() -> None:
    script = """
import sys
from fray.runtime.serialization import pickling
class Greeter:
    def __init__(self, name): self.name = name
    def greet(self): return "hello " + self.name
def double(x): return 2 * x
sys.stdout.buffer.write(pickling.dumps((Greeter("you"), double, Greeter)))
"""
    data = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    greeter, double, cls = pickling.loads(data)
    assert greeter.greet() == "hello you"
    assert double(4) == 8
    assert isinstance(greeter, cls)


def test_an_instance_of_a_scripts_class_comes_home_as_the_same_class() -> None:
    script = """
import subprocess, sys
from fray.runtime.serialization import pickling
class Greeter: pass
echo = "import sys; from fray.runtime.serialization.pickling import *"
echo += "; sys.stdout.buffer.write(dumps(loads(sys.stdin.buffer.read())))"
echoed = subprocess.run([sys.executable, "-c", echo], input=pickling.dumps(Greeter()), capture_output=True, check=True)
assert type(pickling.loads(echoed.stdout)) is Greeter
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# Values that cannot be pickled ----------------------------------------------------------------------------------------


class Foo:
    def __init__(self) -> None:
        self.fine = 1
        self.lock = threading.Lock()


@dataclass
class Outer:
    inner: list[Foo] = field(default_factory=lambda: [Foo()])


class Slotted:
    __slots__ = ("lock",)

    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (Foo(), "attribute 'lock' of Foo"),
        (Outer(), "attribute 'inner' of Outer: item 0: attribute 'lock' of Foo"),
        ({"a": 1, "b": [threading.Lock()]}, "item 'b': item 0"),
        (Slotted(), "attribute 'lock' of Slotted"),
        (Foo().__init__, "its object: attribute 'lock' of Foo"),
    ],
    ids=["attribute", "nested", "mapping", "slots", "bound method"],
)
def test_the_message_names_the_part_that_cannot_be_pickled(value: Any, path: str) -> None:
    with pytest.raises(NotPicklable, match=r"cannot pickle '_thread\.lock' object") as caught:
        pickling.dumps(value, "the result of a.m()")
    assert str(caught.value).startswith(f"the result of a.m() cannot be sent: {path}: ")


def test_a_closure_over_a_lock_names_the_variable() -> None:
    lock = threading.Lock()
    with pytest.raises(NotPicklable, match="variable 'lock' of <lambda>"):
        pickling.dumps(lambda: lock)


def test_the_argument_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(NotPicklable, match=r"argument 2 of add\(\) cannot be sent: attribute 'lock' of Foo"):
        pickling.pack_call("add", (1, Foo()), {})
    with pytest.raises(NotPicklable, match=r"argument 'how' of add\(\) cannot be sent"):
        pickling.pack_call("add", (1,), {"how": Foo()})


def test_a_reducer_that_raises_is_not_picklable() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("no")

    with pytest.raises(NotPicklable, match="no"):
        pickling.dumps(Odd())


def test_a_cycle_does_not_keep_the_search_running() -> None:
    ring: list[Any] = []
    ring.append(ring)
    ring.append(threading.Lock())
    with pytest.raises(NotPicklable, match="item 1"):
        pickling.dumps(ring)


# Errors --------------------------------------------------------------------------------------------------------------


class Picky(Exception):
    """Error whose constructor takes other arguments than it passes to its base."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.where = where


class Holder(Exception):
    """Object with a part that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class MyGroup(ExceptionGroup[Exception]):
    pass


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        if cause is not None:
            raise error from cause
        raise error
    except BaseException as caught:  # noqa: BLE001 - it is what the test is about
        return caught


def round_trip(error: BaseException) -> BaseException:
    return errors.load_error(errors.dump_error(error))


def test_an_error_keeps_type_arguments_and_notes() -> None:
    error = raised(KeyError("k", 3))
    error.add_note("in passing")
    back = round_trip(error)
    assert type(back) is KeyError
    assert back.args == ("k", 3)
    assert back.__notes__ == ["in passing"]


def test_the_remote_traceback_is_its_cause_and_is_printed() -> None:
    back = round_trip(raised(ValueError("far away")))
    assert isinstance(back.__cause__, RemoteTraceback)
    text = "".join(traceback.format_exception(back))
    assert text.count("ValueError: far away") == 1
    assert text.count("in raised") == 2  # at the top, and as the last frame
    assert "direct cause" in text
    assert "in raised" in back.__cause__.text


def test_causes_keep_their_place_and_the_chain_ends_with_the_traceback() -> None:
    back = round_trip(raised(ValueError("outer"), raised(OSError(2, "inner"), LookupError("root"))))
    assert type(back.__cause__) is FileNotFoundError or type(back.__cause__) is OSError
    assert type(back.__cause__.__cause__) is LookupError
    assert isinstance(back.__cause__.__cause__.__cause__, RemoteTraceback)


def test_an_error_that_travels_twice_tells_both_places() -> None:
    def second() -> None:
        raise round_trip(raised(ValueError("first place")))

    try:
        second()
    except ValueError as error:
        back = round_trip(error)
    assert isinstance(back.__cause__, RemoteTraceback)
    assert "in raised" in back.__cause__.text
    assert "in second" in back.__cause__.text


def test_an_error_whose_constructor_differs_keeps_its_type_and_attributes() -> None:
    back = round_trip(raised(Picky(7, where="here")))
    assert isinstance(back, Picky)
    assert (back.code, back.where, str(back)) == (7, "here", "code 7")


def test_an_error_that_holds_a_lock_comes_without_its_attributes() -> None:
    back = round_trip(raised(Holder("text")))
    assert isinstance(back, Holder)
    assert str(back) == "text"
    assert not hasattr(back, "lock")


def test_an_error_with_an_argument_that_cannot_travel_becomes_text() -> None:
    back = round_trip(raised(ValueError("see", threading.Lock())))
    assert isinstance(back, RemoteError)
    assert "ValueError" in str(back)
    assert "in raised" in back.__cause__.text


def test_an_error_of_a_class_that_is_not_here_becomes_text() -> None:
    script = """
import sys, types
from fray.runtime.serialization import errors
module = types.ModuleType("elsewhere"); sys.modules["elsewhere"] = module
exec("class Far(Exception): pass", module.__dict__)
try: raise module.Far("unknown here")
except Exception as error: sys.stdout.buffer.write(errors.dump_error(error))
"""
    data = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True).stdout
    back = errors.load_error(data)
    assert isinstance(back, RemoteError)
    assert "elsewhere.Far: unknown here" in str(back)
    assert back.details["type"] == "elsewhere.Far"
    assert "Traceback" in back.details["traceback"]


def test_an_error_without_a_text_travels() -> None:
    assert type(round_trip(raised(Mute()))) is Mute


def test_groups_keep_their_members_with_their_causes() -> None:
    group = raised(ExceptionGroup("both", [raised(ValueError("a"), KeyError("why")), TypeError("b")]))
    back = round_trip(group)
    assert isinstance(back, ExceptionGroup)
    assert back.message == "both"
    assert [type(member) for member in back.exceptions] == [ValueError, TypeError]
    assert isinstance(back.exceptions[0].__cause__, KeyError)


def test_a_group_keeps_its_class_and_the_members_that_can_travel() -> None:
    back = round_trip(raised(MyGroup("mine", [ValueError("a"), ValueError(threading.Lock())])))
    assert isinstance(back, MyGroup)
    assert [type(member) for member in back.exceptions] == [ValueError, RemoteError]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_errors_that_would_end_the_caller_arrive_as_a_remote_error(error: BaseException) -> None:
    back = round_trip(raised(error))
    assert isinstance(back, RemoteError)
    assert type(error).__name__ in str(back)


def test_frays_own_errors_keep_their_details() -> None:
    back = round_trip(raised(ActorDied("gone", actor="a")))
    assert isinstance(back, ActorDied)
    assert back.details == {"actor": "a"}


def test_an_error_can_be_pickled_after_it_has_travelled() -> None:
    back = round_trip(raised(ValueError("x")))
    assert type(pickle.loads(pickle.dumps(back))) is ValueError


def test_tensors_leave_the_pickle_where_torch_is_there() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(100_000, dtype=torch.float32).reshape(100, 1000)
    half = tensor.to(torch.bfloat16).requires_grad_()
    values = {"a": tensor, "half": half, "gaps": tensor[:, ::2], "fn": lambda: 1}
    packed = pickling.pack(values)
    assert isinstance(packed, PickledObject)
    assert len(packed.pickle) + sum(map(len, packed.sources)) < 1_200_000
    first, *buffers = [bytearray(source) for source in packed.sources]  # the gaps stay in the pickle, and make it large
    assert packed.pickled_first
    back = pickling.loads(first, buffers)
    assert torch.equal(back["a"], tensor)
    assert torch.equal(back["half"], half)
    assert back["half"].requires_grad
    assert torch.equal(back["gaps"], tensor[:, ::2])
    back["a"] += 1
