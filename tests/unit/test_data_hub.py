"""Datasets of the Hub are downloaded from a small local one, and read again without it."""

import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from processes import run_python

from trainer.data.readers import iter_rows

OLD = "1" * 40
NEW = "2" * 40
SCRIPT = """
import logging, sys
from trainer.data.files import resolve_files
from trainer.errors import DataError
logging.basicConfig(level="INFO", format="%(message)s")
for address in sys.argv[1:]:
    try:
        print(*resolve_files(address))
    except DataError as error:
        print("DataError:", " ".join(str(error).split()))
"""


def parquet(text):
    sink = BytesIO()
    pq.write_table(pa.table({"text": [text]}), sink)
    return sink.getvalue()


def commit(name):
    return {
        "data/train-00000-of-00002.parquet": parquet(f"{name} 0"),
        "data/train-00001-of-00002.parquet": parquet(f"{name} 1"),
        "data/train_sft-0.parquet": parquet(f"{name} sft"),
        "a/test.parquet": parquet(f"{name} a"),
        "b/test/0000.parquet": parquet(f"{name} b"),
        "extra/chats.jsonl": f'{{"text": "{name} line"}}'.encode(),
        "README.md": b"# A dataset",
    }


class Hub(BaseHTTPRequestHandler):
    """The requests of a download."""

    commits: ClassVar = {OLD: commit("old"), NEW: commit("new")}
    refs: ClassVar = {"main": OLD}
    gets: ClassVar[list[str]] = []

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        match self.path.partition("?")[0].strip("/").split("/"):
            case ["api", "datasets", "org", "name", *more]:
                self._tell(more[1] if len(more) > 1 else "main", is_tree=more[:1] == ["tree"])
            case ["datasets", "org", "name", "resolve", revision, *place]:
                self._send(revision, "/".join(place))

    def _tell(self, revision, *, is_tree):
        sha = self.refs.get(revision, revision)
        if sha not in self.commits:
            return self._answer(b"{}", {"X-Error-Code": "RevisionNotFound"}, 404)
        files = self.commits[sha]
        tree = [{"type": "file", "path": n, "size": len(d), "oid": "0"} for n, d in files.items()]
        content = {"id": "org/name", "_id": "1", "sha": sha, "private": False, "tags": []}
        siblings = [{"rfilename": name} for name in files]
        answer = json.dumps(tree if is_tree else {**content, "siblings": siblings}).encode()
        return self._answer(answer, {"Content-Type": "application/json"})

    def _send(self, revision, name):
        sha = self.refs.get(revision, revision)
        self.gets.append(f"{self.command} {name}")
        headers = {"X-Repo-Commit": sha, "ETag": f'"{sha[:8]}{hash(name):x}"'}
        return self._answer(self.commits[sha][name], headers)

    def _answer(self, content, headers, status=200):
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_args):
        """The message does not appear on the terminal."""


@pytest.fixture
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def resolve(cache, endpoint, *addresses, **more):
    """Return the result of each address and the log. A separate process does it, because the client
    reads its environment once.
    """
    environment = os.environ | {"HF_HOME": str(cache), "HF_ENDPOINT": endpoint}
    environment |= {"HF_HUB_OFFLINE": "0", **more}
    words = ["-c", SCRIPT, *(f"hf://org/{address}" for address in addresses)]
    done = run_python(*words, env=environment, check=True)
    return done.stdout.splitlines(), done.stderr


def texts(line):
    return [row.record["text"] for path in line.split() for row in iter_rows(Path(path), ("text",))]


def test_a_split_is_downloaded_and_stays_at_its_revision(tmp_path, endpoint, monkeypatch):
    monkeypatch.setattr(Hub, "refs", dict(Hub.refs))
    monkeypatch.setattr(Hub, "gets", [])
    splits = {
        "name:train": ["old 0", "old 1"],
        f"name@{OLD}:train_sft": ["old sft"],
        "name:a/*.parquet": ["old a"],
        "name:b/test": ["old b"],
        f"name@{OLD}:extra/chats.jsonl": ["old line"],
    }
    found, told = resolve(tmp_path, endpoint, *splits)
    assert list(map(texts, found)) == list(splits.values())
    assert (
        f"hf://org/name:train: using revision {OLD}" in told
        and f"hf://org/name@{OLD}:train" in told
    )
    assert "README" not in str(Hub.gets), "only what the split needs"

    Hub.refs["main"] = NEW
    (again, new), _ = resolve(tmp_path, endpoint, "name:train", f"name@{NEW}:train")
    assert again == found[0] and texts(new) == ["new 0", "new 1"]


def test_what_was_downloaded_is_read_without_a_network_and_the_rest_is_told(tmp_path, endpoint):
    wrong = ["name:none", "name:test", "name@v9:train", "name"]
    (found, no_split, subsets, no_revision, no_address), _ = resolve(
        tmp_path, endpoint, "name:train", *wrong
    )
    assert (
        "the dataset does not have this split" in no_split
        and "data/train_sft-0.parquet" in no_split
    )
    assert "several subsets have this split" in subsets and "a/test, b/test" in subsets
    assert f"if {endpoint}/datasets/org/name exists" in no_revision and "hf auth" in no_revision
    assert "is not an address" in no_address
    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        refusing = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for offline in ("0", "1"):
            asked = "name:train", f"name@{OLD}:extra/chats.jsonl"
            (again, missing), _ = resolve(tmp_path, refusing, *asked, HF_HUB_OFFLINE=offline)
            assert again == found
            assert "hf download" in missing and f"--revision {OLD}`" in missing
        Path(found.split()[1]).unlink()
        (torn,), _ = resolve(tmp_path, refusing, "name:train", HF_HUB_OFFLINE="1")
        assert "is not complete in the Hub's cache" in torn
