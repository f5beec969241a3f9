"""Weights that are published: which versions are kept, files of them, tables of safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from fray.errors import ObjectLost
from fray.rl.core.versions import VersionName
from fray.rl.weight_files import header_of, table_of_files
from fray.rl.weights.published import KeptWeights, PublishedWeights, WeightFile
from fray.rl.weights_table import WeightPlace, WeightTable

TABLE = WeightTable.of_tensors([("embedding", (2, 3), "float32")])


def weights_of(number: int, directory: Path = Path()) -> PublishedWeights:
    return PublishedWeights(TABLE, WeightFile(directory / f"0.{number}.safetensors"))


def test_the_newest_version_is_kept_and_those_that_servers_need() -> None:
    kept = KeptWeights()
    names = [VersionName(0, number) for number in range(5)]
    kept.add(names[0], None, (names[0], None))
    all_weights = [weights_of(number) for number in range(5)]
    for number in (1, 2):
        kept.add(names[number], all_weights[number], (names[number], names[number - 1]))
    assert list(kept.kept) == [names[1], names[2]]
    for number in (3, 4):
        kept.add(names[number], all_weights[number], (names[2], names[2]))
    assert list(kept.kept) == [names[2], names[4]], "a validation uses version 2"
    again = weights_of(4)
    kept.add(names[4], again, (names[4], names[4]))
    assert kept.kept == {names[4]: again}


def test_a_file_is_mapped_and_its_removal_is_an_object_that_is_lost(tmp_path: Path) -> None:
    async def main() -> None:
        weights = weights_of(1, tmp_path).content
        with pytest.raises(ObjectLost, match=r"0\.1\.safetensors no longer exists: newer weights have replaced it"):
            await weights
        (tmp_path / "0.1.safetensors").write_bytes(b"weights")
        mapped = await weights
        await weights.release()
        assert bytes(mapped) == b"weights", "what was mapped stays readable"
        await weights.release()

    trio.run(main)
    assert not list(tmp_path.iterdir())


def test_the_table_of_safetensors_is_that_of_the_whole_file() -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "bias": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]},
            "embedding": {"dtype": "F32", "shape": [2, 3], "data_offsets": [8, 32]},
        }
    ).encode()
    table = table_of_files(len(header).to_bytes(8, "little") + header + bytes(32))
    assert table.places == {
        "bias": WeightPlace(8 + len(header), (3,), "bfloat16"),
        "embedding": WeightPlace(16 + len(header), (2, 3), "float32"),
    }
    assert TABLE.difference_text(table) == "it has bias, which the model lacks"


def test_a_header_and_the_tensors_without_gaps_are_a_file_of_safetensors() -> None:
    tensors = [("bias", (3,), "bfloat16"), ("one", (), "float32"), ("none", (0, 4), "int8"), ("all", (2, 2), "float64")]
    table = WeightTable.of_tensors(tensors)
    buffer = bytes(range(200))[: table.total_bytes]
    parts = {name: buffer[place.offset : place.offset + place.byte_count] for name, place in table.places.items()}
    content = header_of(table) + b"".join(parts.values())
    found = table_of_files(content)
    assert table.difference_text(found) == found.difference_text(table) == ""
    assert {name: place.dtype for name, place in found.places.items()} == {name: kind for name, _, kind in tensors}
    for name, place in found.places.items():
        assert content[place.offset : place.offset + place.byte_count] == parts[name]
    assert len(header_of(table)) % 8 == 0, "tensors begin where readers map them"
    try:
        from safetensors import deserialize
    except ImportError:
        return
    assert {name: bytes(entry["data"]) for name, entry in deserialize(content)} == parts
