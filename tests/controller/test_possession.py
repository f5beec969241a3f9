"""Content of others, of which only the hash is known: it can be neither launched nor read, until it was uploaded."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from attrs import evolve

from fray.controller.workspaces.possession import CHUNKS_LIMIT, Possession
from fray.errors import FrayError, InvalidRequest, Unauthorized
from fray.model.environment import UNSENT, EnvironmentSpec
from fray.model.messages.bundles import FetchValue, OfferBundle, OfferValue, PutChunk
from fray.model.messages.client import Launch, Role, SaveCheckpoint
from fray.model.specs import EntryKind
from fray.model.workspace import FILE, FileEntry, Manifest, ManifestChunk, manifest_parts, write_manifest
from fray.net.codec import blob_id
from fray.net.large_values import list_parts
from fray.net.transport import Credential
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.runtime.scope.children import ChildKind, OnChildFailure
from fray.runtime.scope.scope import open_child_scope
from tests.support.controller import ADDRESS, Client, Node, Stage, spec, stage

CONTENT = b"print('secret')"
TEXT = write_manifest(
    Manifest(
        (FileEntry("main.py", FILE, blob_id(CONTENT), len(CONTENT)),),
        (ManifestChunk(blob_id(CONTENT), len(CONTENT), False),),
    )
)
PARTS = {blob_id(part): part for part in [*manifest_parts(TEXT), CONTENT]}
BUNDLE = hashlib.sha256(TEXT).hexdigest()
OFFER = OfferBundle(bundle=BUNDLE, parts=tuple(map(blob_id, manifest_parts(TEXT))), size_bytes=100)


async def send(client: Client, offer: Any = OFFER, parts: Any = PARTS) -> int:
    """Send what the controller asks for; return the number of chunks."""
    sent = 0
    while not (state := await client.ask(offer)).complete:
        assert state.missing
        for chunk in state.missing:
            await client.ask(PutChunk(chunk=chunk), [parts[chunk]])
            sent += 1
    return sent


def program(name: str) -> Any:
    return spec(name, entry=EntryKind.BINARY, argv=("true",), environment=EnvironmentSpec(bundle=BUNDLE))


async def people(cluster: Stage, *users: str) -> Sequence[Client]:
    admin = await cluster.client(host="admin", user="root")
    found = {user: await cluster.person(user, "user", admin) for user in users}
    return [await cluster.client(host=user, credential=found[user]) for user in users]


async def job_of(cluster: Stage, node: Node, name: str) -> Client:
    desired = await node.wait_desired(f"{name}-1:0:0")
    credential = Credential(f"attempt:{desired.attempt_id}", desired.key)
    return await cluster.client(role=Role.JOB, host=name, attempt_id=desired.attempt_id, credential=credential)


async def test_a_workspace_of_others_cannot_be_launched_by_its_hash(autojump_clock: Any) -> None:
    async with stage() as cluster:
        ada, bob = await people(cluster, "ada", "bob")
        assert await send(ada) == 2
        await ada.launch(program("own"))
        with pytest.raises(InvalidRequest, match="was not uploaded: upload it, and launch again"):
            await bob.launch(program("stolen"))
        # He is asked for all of it, as if it were not there, and with it he has proven that he has it.
        assert await send(bob) == 2
        await bob.launch(program("uploaded"))


async def test_a_workspace_is_sent_once_by_all_processes_of_a_person(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin = await cluster.client(host="admin", user="root")
        key = await cluster.person("ada", "user", admin)
        assert await send(await cluster.client(host="laptop", credential=key)) == 2
        desktop = await cluster.client(host="desktop", credential=key)
        assert await send(desktop) == 0
        await desktop.launch(program("same"))
        # After a restart: the job on record has it.
        await cluster.crash()
        await cluster.start()
        assert await send(await cluster.client(host="phone", credential=key)) == 0


class Source:
    """The workspace above, as a runtime reads it from a directory."""

    bundle, parts, size_bytes = BUNDLE, OFFER.parts, OFFER.size_bytes

    async def read(self, blob: str) -> bytes:
        return PARTS[blob]


async def test_a_launch_whose_workspace_was_sent_before_a_restart_of_the_controller_sends_it_again(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage() as cluster:
        key = await cluster.person("ada", "user")
        config = RuntimeConfig(role=Role.DRIVER, namespace="lab")
        async with open_runtime(cluster.network.at("laptop"), [ADDRESS], key, config, rng=random.Random(1)) as runtime:

            async def find(path: str) -> Source:
                return Source()

            runtime.find_workspace = find
            launch, restarts = runtime.client.jobs.launch, 0

            async def restart_and_launch(*args: Any) -> Any:
                nonlocal restarts
                if not restarts:
                    restarts += 1
                    await cluster.crash()
                    await cluster.start()
                return await launch(*args)

            monkeypatch.setattr(runtime.client.jobs, "launch", restart_and_launch)
            with trio.CancelScope() as block:
                async with open_child_scope(runtime, "run") as scope:
                    sent = evolve(program("work"), environment=EnvironmentSpec(bundle=UNSENT + "/src"))
                    (record,) = await scope.launch(
                        [sent], [], ChildKind.JOB, OnChildFailure.ABSORB, lambda record: FrayError("ended")
                    )
                    assert restarts == 1
                    assert record.info.job_id == "work-1"
                    block.cancel()


async def test_a_job_launches_children_with_its_own_workspace_and_not_with_that_of_others(autojump_clock: Any) -> None:
    async with stage() as cluster:
        node = await cluster.node()
        ada, bob = await people(cluster, "ada", "bob")
        await send(ada)
        await ada.launch(program("parent"))
        await bob.launch(spec("other"))
        assert await send(await job_of(cluster, node, "parent")) == 0
        await (await job_of(cluster, node, "parent")).launch(program("child"))
        with pytest.raises(InvalidRequest, match="was not uploaded"):
            await (await job_of(cluster, node, "other")).launch(program("stolen"))


async def test_the_holder_of_the_token_sends_nothing_that_is_there(autojump_clock: Any) -> None:
    async with stage() as cluster:
        (ada,) = await people(cluster, "ada")
        await send(ada)
        assert await send(await cluster.client(host="root", user="root")) == 0


async def test_code_and_results_of_others_cannot_be_launched_by_their_hash(autojump_clock: Any) -> None:
    async with stage() as cluster:
        node = await cluster.node()
        ada, bob = await people(cluster, "ada", "bob")
        await ada.launch(spec("code", b"secret code"), payload=b"secret code")
        await ada.launch(spec("done"))
        await node.wait_desired("done-1:0:0")
        node.succeed("done-1:0:0", b"secret result")
        await ada.job_ended("done-1")
        for content in (b"secret code", b"secret result"):
            stolen = Launch(jobs=(spec("stolen", content),))
            with pytest.raises(InvalidRequest, match="is not attached, or was damaged: send the launch again"):
                await bob.ask(stolen)
        # A repeated launch of one's own may still leave it out.
        await ada.ask(Launch(jobs=(spec("again", b"secret code", job_id="again-1"),)))
        # Nor does a checkpoint make it readable.
        await bob.launch(spec("actor"))
        with pytest.raises(InvalidRequest, match="the checkpoint is not attached"):
            await (await job_of(cluster, node, "actor")).ask(SaveCheckpoint(number=1, blob=blob_id(b"secret result")))


async def test_a_large_value_of_others_is_asked_for_and_not_given(autojump_clock: Any) -> None:
    async with stage() as cluster:
        ada, bob = await people(cluster, "ada", "bob")
        content = b"weights"
        value = list_parts(len(content), [content])
        offer = OfferValue(value=value.name, size_bytes=value.size_bytes, parts=value.parts)
        parts = {blob_id(content): content}
        assert await send(ada, offer, parts) == 1
        assert not (await bob.ask(offer)).complete
        with pytest.raises(InvalidRequest, match="is not attached"):
            await bob.ask(Launch(jobs=(evolve(spec("stolen"), payload=value.name),)))
        with pytest.raises(Unauthorized):
            await bob.ask(FetchValue(value=offer.value))
        assert await send(bob, offer, parts) == 1
        await bob.ask(Launch(jobs=(evolve(spec("uploaded"), payload=value.name),)))


def test_what_was_used_longest_ago_is_forgotten() -> None:
    known = Possession()
    for number in range(CHUNKS_LIMIT):
        known.add_chunk("user ada", str(number))
    assert known.has_chunk("user ada", "0")
    known.add_chunk("user bob", "x")
    assert known.has_chunk("user ada", "0")
    assert not known.has_chunk("user ada", "1")
    assert not known.has_chunk("user bob", "0")
