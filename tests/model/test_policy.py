"""The operator's policy: what a file says, what is wrong with it, and who may have which band."""

from __future__ import annotations

import os
import re
import signal
import tomllib
from pathlib import Path

import pytest
import trio

import fray
from fray.controller.policy_file import read_policy_file, reload_on_hangup
from fray.deploy.cluster_spec import parse_spec
from fray.errors import InvalidRequest
from fray.model.policy.parser import (
    NAMESPACE,
    TABLES,
    USER,
    read_policy,
)
from fray.model.policy.policy import Amounts, Policy, TenantPolicy
from fray.model.policy.priority import Band
from fray.scheduler.effects import PolicyChanged
from tests.support.scheduler import Cluster, job

FILE = """
half_life_s = 3600

[users."*"]
bands = ["interactive", "batch"]
quota = { cpu = 64 }

[users.alice]
weight = 2
quota = { cpu = 0.5, memory = "1TB", gpu = 8, "gpu:H100" = 4 }
borrow = { gpu = 4 }

[namespaces."rl/atari"]
weight = 3
borrow = false

[[group]]
name = "spares"
provider = "fixed"
options.machines = ["h1", "h2"]
"""


def read(text: str, tmp_path: Path) -> Policy:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    return read_policy_file(file)


def test_prices_are_read_by_kind_and_variant(tmp_path: Path) -> None:
    text = '[prices]\ncpu = 0.03\nmemory = 0.004\ngpu = 2\n"GPU:H100" = 3.5\n"tpu:v5litepod-16" = 1.2\n'
    expected = {"cpu": 0.03, "memory": 0.004, "gpu": 2.0, "gpu:h100": 3.5, "tpu:v5litepod-16": 1.2}
    assert read(text, tmp_path).prices == expected
    with pytest.raises(InvalidRequest, match=r"\[prices\]: unknown key 'cpus'; did you mean cpu"):
        read("[prices]\ncpus = 1\n", tmp_path)
    with pytest.raises(InvalidRequest, match=r"\[prices\] gpu=-1 must be a number, 0 or more"):
        read("[prices]\ngpu = -1\n", tmp_path)


def test_a_policy_is_read(tmp_path: Path) -> None:
    policy = read(FILE, tmp_path)
    assert policy.half_life_s == 3600
    both = (Band.INTERACTIVE, Band.BATCH)
    own = Amounts(cpu_milli=500, memory_bytes=1024**4, devices={"gpu": 8, "gpu:h100": 4})
    assert policy.user("alice") == TenantPolicy(weight=2, bands=both, quota=own, borrow=Amounts(devices={"gpu": 4}))
    assert policy.user("bob") == TenantPolicy(bands=both, quota=Amounts(cpu_milli=64_000))
    assert policy.namespace("rl/atari") == TenantPolicy(weight=3, borrow=False)
    assert policy.namespace("other") == TenantPolicy()
    assert [group.name for group in policy.groups] == ["spares"]


def test_an_empty_policy_is_the_default_one(tmp_path: Path) -> None:
    assert read("", tmp_path) == Policy()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("weight", "invalid TOML"),
        ("half_live_s = 1", "unknown key 'half_live_s'; did you mean half_life_s?"),
        ("half_life_s = 0", "half_life_s=0 must be a number, more than 0"),
        ("users = 3", r"users=3 must be a table: write \[users\]"),
        ("[users]\nalice = 2", r"\[users\]: alice=2 must be a table: write \[users.NAME\]"),
        ("[users.alice]\nwieght = 2", r"\[users.alice\]: unknown key 'wieght'; did you mean weight?"),
        ("[users.alice]\nweight = -1", r"\[users.alice\] weight=-1 must be a number, more than 0"),
        ("[users.alice]\nbands = ['produktion']", "invalid priority band 'produktion'; .* did you mean 'production'"),
        ("[users.alice]\nbands = []", "must be a list of bands"),
        ("[users.alice]\nquota = 3", r"\[users.alice\] quota=3 must be amounts: write \{ cpu = 64"),
        ("[users.alice]\nquota = { cpus = 3 }", "quota: unknown key 'cpus'; did you mean cpu"),
        ("[users.alice]\nquota = { gpu = -3 }", "quota.gpu=-3 must be a whole number"),
        ("[users.alice]\nquota = { memory = 'much' }", "quota.memory='much' is not a valid size"),
        ("[users.alice]\nborrow = 'no'", "borrow='no' must be true, false, or amounts"),
        ("[namespaces.'a b']\nbands = ['batch']", r"\[namespaces.'a b'\]: unknown key 'bands'"),
        ("group = 3", r"group=3 must be tables: write \[\[group\]\]"),
        ("[[group]]\nname = 'a'\nprovider = 'x'", r"\[\[group\]\] 'a': provider='x'"),
        (
            "[[group]]\nname='a'\nprovider='process'\n[[group]]\nname='a'\nprovider='process'",
            "two groups have this name",
        ),
    ],
)
def test_an_error_in_a_policy_names_its_place(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"policy.toml.*{says}"):
        read(text, tmp_path)


def test_a_missing_policy_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_policy_file(tmp_path / "none")


def test_a_spec_may_name_a_policy() -> None:
    assert parse_spec("machine?nodes=1&policy=/a/b.toml").policy == "/a/b.toml"
    assert parse_spec("local?policy=b.toml").policy == "b.toml"
    with pytest.raises(fray.UnknownClusterSpec, match="policy=FILE"):
        parse_spec("local?polizy=b.toml")


async def test_a_cluster_with_a_wrong_policy_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("user = 3")
    for spec in ("local", "machine"):
        with pytest.raises(InvalidRequest, match="did you mean users"):
            async with fray.open_cluster(f"{spec}?policy={tmp_path}/p"):
                pass


HUGE = "9" * 400
"""More than a float can be, and no more digits than a TOML parser takes."""


@pytest.mark.parametrize(
    "text",
    [
        f"half_life_s = {HUGE}",
        "half_life_s = nan",
        "half_life_s = inf",
        "half_life_s = 1e-320",
        f"half_life_s = {'9' * 5000}",
        f"half_life_s = 0x{'f' * 6000}",
        f"spend_limit_per_hour = {HUGE}",
        "spend_limit_per_hour = -1",
        "[users.a]\nweight = 1e-320",
        "[users.a]\nweight = 1e308",
        f"[users.a]\nquota = {{ cpu = {HUGE} }}",
        "[users.a]\nquota = { cpu = 1e308 }",
        f"[users.a]\nquota = {{ gpu = {HUGE} }}",
        f"[users.a]\nquota = {{ memory = '{HUGE}TB' }}",
        f"[users.a]\nquota = {{ memory = {HUGE} }}",
        '[users."a\\u001b[2J"]\nweight = 1',
        f"[preemption]\nlimit = {HUGE}",
        f"[preemption]\nshield_s = {HUGE}",
        "[preemption]\npatience_s = nan",
        "a = " + "[" * 50_000,
        "a = " + "{ b = " * 5_000,
        "k" * 500_000 + " = 1",
        'half_life_s = "' + "x" * 500_000 + '"',
        "\ufeffhalf_life_s = 5",
        "half_life_s = 5\0",
        "#" + " " * 1024 * 1024,
    ],
)
def test_an_absurd_file_gets_a_short_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"policy\.toml") as caught:
        read(text, tmp_path)
    assert len(str(caught.value)) < 2_100


@pytest.mark.parametrize(
    "line",
    [
        *(f"{key} = {HUGE}" for key in ("max", "buffer", "gpus", "cpu", "price_per_hour", "idle_s", "boot_timeout_s")),
        *(f"{key} = nan" for key in ("cpu", "price_per_hour", "idle_s", "boot_timeout_s")),
        *(f"{key} = -1" for key in ("min", "max", "buffer", "gpus", "cpu", "idle_s", "boot_timeout_s")),
        "cpu = inf",
        "boot_timeout_s = inf",
        "zones = [1, 2]",
        'zones = [["a"]]',
        "zones = [{ a = 1 }]",
        'prices = { "" = true }',
        f"memory = '{HUGE}GB'",
        "memory = 'much'",
        "tpu = 'v99-7'",
        'attributes = { a = "\\u0000" }',
        'provider = "command"',
    ],
)
def test_an_absurd_group_gets_an_error_that_names_it(line: str, tmp_path: Path) -> None:
    head = "[[group]]\nname = 'odd'\n" + ("" if "provider" in line else "provider = 'process'\n")
    with pytest.raises(InvalidRequest, match=r"policy.toml: \[\[group\]\] 'odd'") as caught:
        read(head + line, tmp_path)
    assert len(str(caught.value)) < 1_000


def test_a_group_has_the_cloud_s_spelling_of_its_tpu_type(tmp_path: Path) -> None:
    head = "[[group]]\nname = 'g'\nprovider = 'process'\ntpu = "
    (group,) = read(head + "'V5e-16'", tmp_path).groups
    assert group == read(head + "'v5litepod-16'", tmp_path).groups[0]
    assert (group.tpu, group.cpu, group.capacity("").devices[0].variant) == ("v5litepod-16", 112, "v5litepod-16")


def test_the_size_of_a_policy_is_limited(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"\[users\]: 10001 names, at most 10000"):
        read("\n".join(f"users.u{number} = {{}}" for number in range(10_001)), tmp_path)
    with pytest.raises(InvalidRequest, match="group: 1001 groups, at most 1000"):
        read("\n".join(f"[[group]]\nname='g{number}'\nprovider='process'" for number in range(1_001)), tmp_path)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe without a writer would block the controller, and /dev/zero would fill its memory."""
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(InvalidRequest, match=r"not a regular file|cannot read"):
            read_policy_file(place)


def test_a_file_in_latin_1_is_refused(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(InvalidRequest, match="utf-8"):
        read_policy_file(tmp_path / "policy.toml")


async def test_a_hangup_reloads_the_file_and_an_invalid_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, half_lives = tmp_path / "p", []
    there = trio.Event()

    def changed(policy: Policy) -> None:
        half_lives.append(policy.half_life_s)
        there.set()

    def errors() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]

    async with trio.open_nursery() as nursery:
        await nursery.start(reload_on_hangup, file, changed)
        with trio.fail_after(10):
            for number, text in enumerate(("half_life_s = 'x'", f"half_life_s = {HUGE}", "a = " + "[" * 50_000, None)):
                file.unlink(missing_ok=True) if text is None else file.write_text(text)
                os.kill(os.getpid(), signal.SIGHUP)
                while len(errors()) <= number:  # noqa: ASYNC110 - the log sends no notification
                    await trio.sleep(0.01)
            file.write_text("half_life_s = 5")
            os.kill(os.getpid(), signal.SIGHUP)
            await there.wait()
        nursery.cancel_scope.cancel()
    assert half_lives == [5]
    messages = {record.message.partition(": ")[0] for record in caplog.records if record.levelname == "ERROR"}
    assert messages == {"policy reload failed; keeping the previous policy"}
    for why, says in zip(
        errors(), ("half_life_s='x' must be", "half_life_s=999", "nested", "cannot read"), strict=True
    ):
        assert says in why


# Bands


def cluster_with(policy: Policy) -> Cluster:
    cluster = Cluster(policy=policy)
    cluster.driver()
    cluster.node("n1", cpu=4)
    return cluster


def test_a_band_that_the_policy_does_not_allow_is_refused_at_launch() -> None:
    cluster = cluster_with(Policy(users={"alice": TenantPolicy(bands=(Band.BATCH,))}))
    with pytest.raises(InvalidRequest, match=r"user 'alice' may not have priority='production'.* only 'batch'"):
        cluster.launch(job("x", user="alice", band=Band.PRODUCTION))
    with pytest.raises(InvalidRequest, match="may not have priority='system'"):
        cluster.launch(job("x", user="bob", band=Band.SYSTEM))
    cluster.launch(job("x", user="bob", band=Band.PRODUCTION))


def test_the_default_band_is_the_nearest_allowed_one() -> None:
    cluster = cluster_with(
        Policy(users={"alice": TenantPolicy(bands=(Band.BATCH,)), "op": TenantPolicy(bands=(Band.SYSTEM,))})
    )
    cluster.launch(job("a", user="alice"), job("b", user="bob"), job("c", user="op"))
    assert [cluster.state.jobs[name].band for name in "abc"] == [Band.BATCH, Band.INTERACTIVE, Band.SYSTEM]


def test_a_changed_policy_applies_to_new_jobs() -> None:
    cluster = cluster_with(Policy())
    cluster.launch(job("x", user="alice", band=Band.PRODUCTION))
    cluster.tell(PolicyChanged(policy=Policy(users={"alice": TenantPolicy(bands=(Band.BATCH,))})))
    with pytest.raises(InvalidRequest, match="production"):
        cluster.launch(job("y", user="alice", band=Band.PRODUCTION))
    assert cluster.state.jobs["x"].band is Band.PRODUCTION


# The page


def test_the_page_names_every_key_and_its_example_is_valid() -> None:
    page = (Path(__file__).parents[2] / "docs" / "policy.md").read_text()
    named = set(re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE))
    keys = {f"users.NAME.{key}" for key in USER} | {f"namespaces.NAME.{key}" for key in NAMESPACE}
    assert keys | TABLES.keys() - {"users", "namespaces"} <= named
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert read_policy(tomllib.loads(example)).user("alice").weight == 2
