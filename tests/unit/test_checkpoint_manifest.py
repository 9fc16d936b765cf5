"""The manifest: an exact round trip, nothing malformed accepted, every changed byte found."""

import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from checkpoint_fakes import commit, manifest_of, sealed

from trainer.checkpoint.fsio import FileRecord
from trainer.checkpoint.manifest import (
    MANIFEST,
    OWN_DIGEST,
    ManifestError,
    parse_manifest,
    share_of,
    verify_files,
)

RECORD = FileRecord("data.pt", 3, "0" * 64)
GOOD = manifest_of(7, (RECORD,))


def test_round_trip_is_exact():
    for manifest in (
        GOOD,
        replace(
            GOOD, loss=0.1 + 0.2, grad_norm=None, tensors={"s": GOOD.tensors["lm_head.weight"]}
        ),
    ):
        assert parse_manifest(manifest.to_json()) == manifest
        assert parse_manifest(manifest.to_json().encode()) == manifest


def test_a_state_that_is_not_finite_has_no_manifest():
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            replace(GOOD, loss=bad).to_json()


def mutated(key: str, value: Any) -> str:
    tree = json.loads(GOOD.to_json())
    *path, last = key.split(".")
    node = tree
    for part in path:
        node = node[int(part)] if part.isdigit() else node[part]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return sealed(tree)


@pytest.mark.parametrize("name", sorted(json.loads(GOOD.to_json()).keys() - {OWN_DIGEST, "nonce"}))
def test_every_key_is_required_and_typed(name):
    for value in (..., [None], 3 if name == "created_utc" else "text"):
        with pytest.raises(ManifestError):
            parse_manifest(mutated(name, value))


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "a//b",
        "./a",
        "a/",
        "a/./b",
        "a\0b",
        "a\ud800",
        "a\nb",
    ],
)
def test_a_path_that_is_not_plain_is_refused(path):
    with pytest.raises(ManifestError, match="paths inside the checkpoint"):
        parse_manifest(mutated("files.0.path", path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 3),
        ("surprise", 1),
        ("step", True),
        ("step", -1),
        ("world_size", 0),
        ("mesh.fsdp", "2"),
        ("files", []),
        ("files", [vars(RECORD), vars(RECORD)]),
        ("files.0.size_bytes", -1),
        ("files.0.mode", 1),
        ("loss", "1"),
    ],
)
def test_malformed_values_are_refused(key, value):
    with pytest.raises(ManifestError):
        parse_manifest(mutated(key, value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"format": 2',
        "[" * 100_000,
        b"\xff\xfe\x00",
        '{"loss": NaN}',
        f'{{"format": {"9" * 5000}}}',
    ],
    ids=range(9),
)
def test_what_is_not_a_json_object_is_refused(text):
    with pytest.raises(ManifestError):
        parse_manifest(text)


def test_every_flipped_bit_of_a_manifest_is_found():
    data = bytearray(GOOD.to_json().rstrip().encode())
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(ManifestError):
                parse_manifest(bytes(data))
            data[position] ^= 1 << bit


def test_shares_cover_every_file_once_and_are_balanced(tmp_path):
    chance = random.Random(1)
    files = tuple(FileRecord(f"f{i}", chance.randrange(1000), "0" * 64) for i in range(97))
    for count in (1, 2, 7, 120):
        shares = [share_of(files, (index, count)) for index in range(count)]
        assert sorted((r for share in shares for r in share), key=lambda r: r.path) == sorted(
            files, key=lambda r: r.path
        )
        loads = [sum(r.size_bytes for r in share) for share in shares]
        assert max(loads) - min(loads) <= max(r.size_bytes for r in files)
        assert [share_of(files[::-1], (index, count)) for index in range(count)] == shares

    path = commit(tmp_path, 7)
    manifest = parse_manifest((path / MANIFEST).read_bytes())
    (path / "data.pt").write_bytes(b"DATA 7")
    found = [verify_files(path, manifest, share=(rank, 3)) for rank in range(3)]
    assert sorted(found) == [[], [], ["data.pt changed after it was written (sha256 differs)"]]
