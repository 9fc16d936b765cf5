"""As much of the Hub as uploads to a repository ask for, in this process; holds nothing of ours."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs

import httpx
import huggingface_hub
import pytest

LARGE = (".pt", ".gz")
API = "/api/models/org/model"


class FakeHub(BaseHTTPRequestHandler):
    """`files`: of main, as its last commit left them. `commits`: their titles. `refusals`: of
    the next one.
    """

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    files: ClassVar[dict[str, bytes]] = {}
    blobs: ClassVar[dict[str, bytes]] = {}
    commits: ClassVar[list[str]] = []
    uploads: ClassVar[list[str]] = []
    refusals: ClassVar[dict[str, int]] = {}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        if place in (API, f"{API}/revision/main"):
            siblings = [{"rfilename": name} for name in self.files]
            return self._tell(
                {"id": "org/model", "_id": "1", "sha": "1" * 40, "siblings": siblings, "tags": []}
            )
        if place.startswith(f"{API}/tree/main"):
            below = place.removeprefix(f"{API}/tree/main").strip("/")
            return self._tree(f"{below}/" if below else "")
        name = place.removeprefix("/org/model/resolve/main/")
        return self._answer(self.files[name]) if name in self.files else self._fail("EntryNotFound")

    def _tree(self, below: str) -> None:
        found = {name: data for name, data in self.files.items() if name.startswith(below)}
        if below and not found:
            return self._fail("EntryNotFound")
        is_recursive = "recursive=true" in self.path.lower()
        rows = [self._row(name) for name in found]
        inner = {name[: name.index("/", len(below))] for name in found if "/" in name[len(below) :]}
        folders = [
            {"type": "directory", "path": name, "size": 0, "oid": "0"} for name in sorted(inner)
        ]
        return self._tell(
            [row for row in rows if is_recursive or "/" not in row["path"][len(below) :]] + folders
        )

    def _row(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": "0"}

    def do_POST(self) -> None:
        body = self._body()
        if self.path.startswith(f"{API}/preupload/main"):
            modes = [
                (entry["path"], "lfs" if entry["path"].endswith(LARGE) else "regular")
                for entry in json.loads(body)["files"]
            ]
            rows = [
                {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
                for path, mode in modes
            ]
            return self._tell({"files": rows})
        if self.path.startswith(f"{API}/paths-info/main"):
            asked = parse_qs(body.decode())["paths"]
            return self._tell([self._row(name) for name in asked if name in self.files])
        if self.path == "/org/model.git/info/lfs/objects/batch":
            rows = [dict(entry) for entry in json.loads(body)["objects"]]
            for row in rows:
                if row["oid"] not in self.blobs:
                    row["actions"] = {
                        "upload": {"href": f"http://{self.headers['Host']}/lfs/{row['oid']}"}
                    }
            return self._tell({"transfer": "basic", "objects": rows})
        if not self.path.startswith(f"{API}/commit/main"):
            return self._fail("RepoNotFound")
        if "commit" in self.refusals:
            return self._fail("Refused", self.refusals.pop("commit"))
        self._commit([json.loads(line) for line in body.splitlines()])
        return self._tell(
            {
                "success": True,
                "commitOid": "2" * 40,
                "commitUrl": f"http://{self.headers['Host']}/org/model/commit/2",
            }
        )

    def do_PUT(self) -> None:
        data = self._body()
        if "PUT" in self.refusals:
            return self._fail("Refused", self.refusals.pop("PUT"))
        assert hashlib.sha256(data).hexdigest() == self.path.removeprefix("/lfs/")
        self.blobs[self.path.removeprefix("/lfs/")] = data
        self.uploads.append(self.path)
        self._answer(b"")

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        after = dict(self.files)
        for key, value in ((line["key"], line["value"]) for line in lines):
            match key:
                case "header":
                    self.commits.append(value["summary"])
                case "file":
                    after[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    after[value["path"]] = self.blobs[value["oid"]]
                case "deletedFile":
                    del after[value["path"]]
        self.files.clear()
        self.files.update(after)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers["Content-Length"]))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _tell(self, content: object) -> None:
        self._answer(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _fail(self, code: str, status: int = 404) -> None:
        self._answer(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)

    def _answer(
        self, content: bytes, headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        if status == 200 and (asked := self.headers.get("Range", "").removeprefix("bytes=")):
            first, _, last = asked.partition("-")
            content, status = content[int(first) : int(last) + 1 if last else None], 206
        self.send_response(status)
        for key, value in ({"X-Repo-Commit": "1" * 40} | (headers or {})).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_args: Any) -> None:
        """Not on the terminal."""


def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[huggingface_hub.HfFileSystem]:
    """An empty repository org/model, and the client's way to it."""
    for store in (FakeHub.files, FakeHub.blobs, FakeHub.commits, FakeHub.uploads, FakeHub.refusals):
        store.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    # the usual one refuses while tests are offline
    huggingface_hub.set_client_factory(httpx.Client)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    yield huggingface_hub.HfFileSystem(endpoint=endpoint, token=False, skip_instance_cache=True)
    huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)
    server.shutdown()
    server.server_close()
    thread.join()
