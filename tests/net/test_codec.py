"""Bytes on the wire: frames, control messages, and what is not one."""

from __future__ import annotations

import json
import random
import sys

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray import errors
from fray.errors import FrayError, InvalidRequest, MessageTooLarge, NoSuchJob, ProtocolMismatch
from fray.model.messages.client import JobChanged, Launch, LogLines, Names, ProcessMark, Text
from fray.model.resources import Demand
from fray.model.specs import EndReason, EntryKind, JobInfo, JobSpec, JobState, Outcome, TerminationPolicy
from fray.net import codec
from fray.net.codec import ACK, HEADER, Kind, TextRule

SPEC = JobSpec(
    job_id="train-x", name="train", namespace="n", entry=EntryKind.CALLABLE, payload="0" * 64, argv=("a", "b"),
    demand=Demand(cpu_milli=500, regions=("eu",)), env_vars={"A": "b"}, termination=TerminationPolicy(cancel_s=0.5),
)  # fmt: skip
INFO = JobInfo(job_id="train-x", name="train", state=JobState.FAILED, cause=EndReason.OUT_OF_MEMORY, end_time=1.5)

frames = st.lists(
    st.tuples(
        st.sampled_from(list(Kind)),
        st.integers(0, 255),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**64 - 1),
        st.binary(max_size=50) | st.integers(4090, 5000).map(bytes),
    )
)


def batch(ack: int, some: list[tuple[Kind, int, int, int, bytes]]) -> bytes:
    encoded = [
        codec.encode_frame(kind, ref, body, target=target, flags=flags) for kind, flags, target, ref, body in some
    ]
    return ACK.pack(ack) + b"".join(encoded)


def test_a_header_has_twenty_bytes_and_its_fields_in_order() -> None:
    assert codec.encode_frame(Kind.CALL, 5, b"ab", target=3, flags=2) == HEADER.pack(2, 32, 2, 0, 3, 5) + b"ab"
    assert HEADER.size == codec.HEADER_BYTES == 20


@given(st.integers(0, 2**64 - 1), frames)
def test_a_batch_comes_back_as_it_was(ack: int, some: list[tuple[Kind, int, int, int, bytes]]) -> None:
    message = batch(ack, some)
    for data in (message, bytearray(message), memoryview(message)):
        assert codec.read_ack(data) == ack
        assert [(*frame[:4], bytes(frame[4])) for frame in codec.read_frames(data)] == some


@given(frames.filter(bool), st.data())
def test_a_batch_cut_anywhere_yields_whole_frames_and_then_a_protocol_mismatch(
    some: list[tuple[Kind, int, int, int, bytes]], data: st.DataObject
) -> None:
    message = batch(0, some)
    ends = [len(batch(0, some[:n])) for n in range(len(some) + 1)]
    at = data.draw(st.integers(0, len(message) - 1).filter(lambda n: n not in ends))
    got: list[tuple[int, int, int, int]] = []
    with pytest.raises(ProtocolMismatch):
        take_apart(message[:at], got)
    whole = sum(end <= at for end in ends) - 1
    assert got == [frame[:4] for frame in some[: max(0, whole)]]


def take_apart(message: bytes, got: list[tuple[int, int, int, int]]) -> None:
    codec.read_ack(message)
    got.extend(frame[:4] for frame in codec.read_frames(message))  # (what came before an error stays)


@pytest.mark.parametrize(
    "message",
    [
        Launch(jobs=(SPEC,)),
        JobChanged(job=INFO),
        LogLines(job_id="j", name="ä\u2028\x00", attempt_id="a", first=3, end=5),
        Names(key="k", endpoints=(), ended=Outcome(cause=EndReason.KILLED, signal=9)),
    ],
)
def test_a_message_comes_back_with_its_attachments(message: object) -> None:
    blobs = [b"", b"abc", bytearray(b"d" * 5000), memoryview(b"xyz")]
    again, views = codec.decode_message(codec.encode_message(message, blobs))
    assert again == message
    assert [bytes(view) for view in views] == [b"", b"abc", b"d" * 5000, b"xyz"]
    assert codec.decode_message(memoryview(codec.encode_message(message)))[0] == message


def test_every_message_class_is_known() -> None:
    for name in (
        "Launch",
        "ObservedState",
        "DesiredState",
        "CallMeta",
        "NodeHello",
        "ClientHello",
        "Hello",
        "Welcome",
        "Goodbye",
    ):
        assert attrs.has(codec.MESSAGES[name])


def test_every_message_class_has_a_tag_of_its_own() -> None:
    """The name of the class is its tag: two classes of one name would be read as the later one."""
    modules = {cls.__module__ for cls in codec.MESSAGES.values() if cls.__module__.startswith("fray.model.messages")}
    for module in modules:
        for name, cls in vars(sys.modules[module]).items():
            if isinstance(cls, type) and attrs.has(cls):
                assert codec.MESSAGES[name] is cls, name


def edit(message: object, **changes: object) -> bytes:
    body = codec.encode_message(message)
    data = json.loads(body[4:]) | changes
    text = json.dumps(data).encode()
    return len(text).to_bytes(4, "little") + text


def test_fields_of_a_later_minor_version_are_ignored() -> None:
    assert codec.decode_message(edit(Text(text="hi"), colour="red"))[0] == Text(text="hi")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "malformed control message"),
        (b"\1\0\0", "malformed control message"),
        (b"\xff\0\0\0{}", "255 bytes of JSON announced"),
        (b"\2\0\0\0[]", "not an object"),
        (b'\x11\0\0\0{"t":"x","a":NaN}', "NaN is not a valid number"),
        (b"\2\0\0\0\xff\xff", "malformed control message"),
        (b"\2\0\0\0{}", "unknown message type None"),
        (edit(Text(text=""), t="os.system"), "unknown message type 'os.system'"),
        (edit(Text(text=""), t=["Text"]), "unknown message"),
        (edit(Text(text=""), b=[1]), r"attachments of \[1\] bytes"),
        (edit(Text(text=""), b=[-1, 1]), "attachments"),
        (edit(Text(text=""), b="x"), "attachments"),
        (edit(JobChanged(job=INFO), job=None), "invalid message"),
        (edit(JobChanged(job=INFO), job={"job_id": "x"}), "required field missing @ JobChanged.job"),
        (b"\x88\x13\0\0" + b"[" * 5000, "malformed control message"),
    ],
)
def test_the_error_of_an_invalid_message_says_what_is_wrong(body: bytes, why: str) -> None:
    with pytest.raises(ProtocolMismatch, match=why):
        codec.decode_message(body)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_protocol_errors(noise: bytes) -> None:
    for decode in (
        codec.decode_message,
        codec.decode_error,
        codec.read_ack,
        lambda data: list(codec.read_frames(data)),
    ):
        try:
            decode(noise)
        except ProtocolMismatch:
            pass


def test_one_byte_over_the_limit_is_refused() -> None:
    room = (
        codec.MESSAGE_LIMIT_BYTES
        - len(codec.encode_message(Text(text=""), [b""]))
        - len(str(codec.MESSAGE_LIMIT_BYTES))
    )
    codec.encode_message(Text(text=""), [bytes(room)])
    with pytest.raises(MessageTooLarge) as caught:
        codec.encode_message(Text(text=""), [bytes(codec.MESSAGE_LIMIT_BYTES)])
    assert caught.value.details["limit_bytes"] == codec.MESSAGE_LIMIT_BYTES


def test_errors_are_sent_with_class_text_and_details() -> None:
    error = codec.decode_error(codec.encode_error(NoSuchJob("no such job", job="x", odd=object)))
    assert type(error) is NoSuchJob
    assert str(error) == "no such job"
    assert error.details == {"job": "x", "odd": "<class 'object'>"}


def test_every_error_of_fray_can_be_sent() -> None:
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, FrayError):
            assert type(codec.decode_error(codec.encode_error(cls("text")))) is cls


@pytest.mark.parametrize(
    "data", [b"[]", b"{}", b'{"error": 1}', b'{"error": "X", "message": "m", "details": 5}', b"nope"]
)
def test_an_invalid_error_is_a_protocol_mismatch(data: bytes) -> None:
    with pytest.raises(ProtocolMismatch):
        codec.decode_error(data)


def test_objects_of_the_model_are_stored_as_json() -> None:
    mark = ProcessMark(boot_id="b", pid=1, start_ticks=2)
    for word in (SPEC, INFO, mark):
        text = codec.to_json(word)
        assert json.loads(text)
        assert codec.from_json(type(word), text) == word
        assert codec.from_json(type(word), text.encode()) == word
    with pytest.raises(ProtocolMismatch, match=r"ProcessMark\.pid|ProcessMark"):
        codec.from_json(ProcessMark, '{"boot_id": "b", "pid": "x", "start_ticks": 2}')
    with pytest.raises(ProtocolMismatch, match="not the JSON of a ProcessMark"):
        codec.from_json(ProcessMark, "{")


def test_a_blob_is_named_by_its_content() -> None:
    data = random.Random(1).randbytes(100)
    assert codec.blob_id(data) == codec.blob_id(memoryview(data)) != codec.blob_id(data + b"!")
    assert len(codec.blob_id(b"")) == 64


def test_empty_defaults_are_omitted_from_a_record_and_restored() -> None:
    plain = JobSpec(job_id="j", name="j", namespace="n", entry=EntryKind.BINARY)
    assert set(json.loads(codec.to_json(plain))).isdisjoint(
        {"payload", "argv", "env_vars", "actor", "pin_cpus", "index"}
    )
    assert codec.from_json(JobSpec, codec.to_json(plain)) == plain
    odd = attrs.evolve(plain, max_retries_failure=0, max_retries_preemption=0, backoff_max_s=0.0, env_vars={"A": ""})
    assert codec.from_json(JobSpec, codec.to_json(odd)) == odd  # empty where the default is not: written


def test_text_that_is_no_unicode_is_refused_with_the_field_or_escaped() -> None:
    body = codec.encode_message(Launch(jobs=(attrs.evolve(SPEC, env_vars={"A": "x\udcf6"}),)))
    assert codec.decode_message(body)[0].jobs[0].env_vars == {"A": "x\udcf6"}
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_checked(body, TextRule.REFUSE)
    assert str(caught.value) == (
        "jobs[0].env_vars.A: 'x\\udcf6' is not valid Unicode text: '\\udcf6' at character 1 is half a surrogate pair. "
        "Bytes in another encoding than UTF-8 (a file name, a variable) have to be decoded with it first"
    )
    assert codec.decode_checked(body, TextRule.ESCAPE)[0].jobs[0].env_vars == {"A": "x\\udcf6"}
    # A key, and capital digits of another encoder.
    body = codec.encode_message(Launch(jobs=(attrs.evolve(SPEC, env_vars={"\ud800": "x"}),)))
    with pytest.raises(InvalidRequest, match=r"env_vars: '\\ud800'"):
        codec.decode_checked(body.replace(b"\\ud800", b"\\uD800"), TextRule.REFUSE)


@given(st.text(st.characters(codec="utf-8")), st.integers(-(2**63), 2**63 - 1))
def test_valid_text_and_numbers_pass_the_checks(text: str, number: int) -> None:
    message = Launch(jobs=(attrs.evolve(SPEC, user=text, demand=Demand(cpu_milli=number)),))
    assert codec.decode_checked(codec.encode_message(message), TextRule.REFUSE)[0] == message


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400])
def test_numbers_of_more_than_64_bits_are_refused(number: int) -> None:
    body = codec.encode_message(Launch(jobs=(attrs.evolve(SPEC, memory_limit_bytes=number),)))
    with pytest.raises(InvalidRequest, match=r"jobs\[0\].memory_limit_bytes: the number .* has more than 64 bits"):
        codec.decode_checked(body, TextRule.REFUSE)
