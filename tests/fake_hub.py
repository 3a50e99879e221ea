"""A Hugging Face hub on 127.0.0.1: what creating a repository and a commit asks for."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import yaml

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_test"


@dataclass
class FakeHub:
    """What the hub holds, and what it was asked."""

    url: str = ""
    visibility: dict[str, bool] = field(default_factory=dict)  # of each repository: is it private?
    branches: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[dict[str, Any]] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)  # large files by their SHA-256
    requests: list[str] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def _answer(self, method: str) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append(f"{method} {path}")
        if method == "PUT":
            self.hub.uploads[path.rpartition("/")[2]] = body
            return self._send(200, {})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error": "Invalid username or password."})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._validate(json.loads(body)["content"])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            repo = match[1]
            return self._send(200, {"id": repo, "private": self.hub.visibility[repo], "siblings": []})
        if match := re.fullmatch(r"/api/models/[^/]+/[^/]+/branch/(.+)", path):
            self.hub.branches.append(match[1])
            return self._send(200, {})
        if "/preupload/" in path:
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                }
                | {"shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return self._send(200, {"files": modes})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**entry, "actions": {"upload": {"href": f"{self.hub.url}/upload/{entry['oid']}"}}}
                for entry in json.loads(body)["objects"]
            ]
            return self._send(200, {"transfer": "basic", "objects": objects})
        if "/commit/" in path:
            return self._commit(body, "/".join(path.split("/")[3:5]))
        return self._send(404, {"error": f"there is no {path}"})

    def _create(self, request: dict[str, Any]) -> None:
        repo = "/".join(filter(None, [request.get("organization"), request["name"]]))
        if repo in self.hub.visibility:
            return self._send(
                409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo}"}
            )
        private = bool(request.get("private")) or request.get("visibility") == "private"
        self.hub.visibility[repo] = private
        return self._send(200, {"url": f"{self.hub.url}/{repo}", "name": repo})

    def _validate(self, card: str) -> None:
        """The hub's rules for the front matter, where we could break them."""
        metadata = yaml.safe_load(card.split("---\n")[1])
        errors = []
        if metadata.get("license") not in (None, "apache-2.0", "mit", "cc-by-4.0"):
            errors.append({"message": '"license" must be one of [apache-2.0, mit, ...]'})
        if not all(re.fullmatch(r"[a-z]{2,3}", code) for code in metadata.get("language", [])):
            errors.append({"message": '"language" must only contain lowercase characters'})
        for model in metadata.get("model-index", []):
            for result in model["results"]:
                if not (result["task"]["type"] and result["dataset"]["type"] and result["dataset"]["name"]):
                    errors.append({"message": '"model-index" is incomplete'})
        self._send(400 if errors else 200, {"errors": errors, "warnings": []})

    def _commit(self, body: bytes, repo: str) -> None:
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.hub.commits.append(value)
            elif entry["key"] == "file":
                self.hub.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.hub.files[value["path"]] = self.hub.uploads[value["oid"]]
        self._send(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
