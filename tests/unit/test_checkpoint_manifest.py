"""The manifest: an exact round trip; malformed manifests are rejected, and every changed byte is
found.
"""

import json
import math
import random
from dataclasses import replace

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


def mutated(key, value):
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


OPTIONAL = {OWN_DIGEST, "nonce", "text_names", "num_passed_through"}


@pytest.mark.parametrize("name", sorted(json.loads(GOOD.to_json()).keys() - OPTIONAL))
def test_every_key_is_required_and_typed(name):
    for value in (..., [None], 3 if name == "created_utc" else "text"):
        with pytest.raises(ManifestError):
            parse_manifest(mutated(name, value))


PATHS = ("", ".", "..", "/etc/passwd", "../x", "a/../../x", "a/..", "a//b", "./a", "a/", "a/./b")
UNPRINTABLE = ("a\0b", "a\ud800", "a\nb")


def test_a_path_that_is_not_plain_is_refused():
    for path in (*PATHS, *UNPRINTABLE):
        with pytest.raises(ManifestError, match="paths inside the checkpoint"):
            parse_manifest(mutated("files.0.path", path))


MALFORMED = [
    mutated("format", 3),
    mutated("surprise", 1),
    mutated("step", True),
    mutated("step", -1),
    mutated("world_size", 0),
    mutated("mesh.fsdp", "2"),
    mutated("files", []),
    mutated("files", [vars(RECORD), vars(RECORD)]),
    mutated("files.0.size_bytes", -1),
    mutated("files.0.mode", 1),
    mutated("loss", "1"),
    "",
    "{",
    "[]",
    "null",
    '{"format": 2',
    "[" * 100_000,
    b"\xff\xfe\x00",
    '{"loss": NaN}',
    f'{{"format": {"9" * 5000}}}',
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_manifests_are_refused(text):
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
        assert sorted(r.path for share in shares for r in share) == sorted(r.path for r in files)
        loads = [sum(r.size_bytes for r in share) for share in shares]
        assert max(loads) - min(loads) <= max(r.size_bytes for r in files)
        assert [share_of(files[::-1], (index, count)) for index in range(count)] == shares

    path = commit(tmp_path, 7)
    manifest = parse_manifest((path / MANIFEST).read_bytes())
    (path / "data.pt").write_bytes(b"DATA 7")
    found = [verify_files(path, manifest, share=(rank, 3)) for rank in range(3)]
    assert sorted(found) == [[], [], ["data.pt changed after it was written (sha256 differs)"]]
