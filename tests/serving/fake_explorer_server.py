"""The fake explorer behind HTTP, with the page and the strictest security policy, as the real server has it.

python tests/serving/fake_explorer_server.py [--port 8900] [--family decoder]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.fake_explorer import FakeExplorer, RefusedError

PAGE = Path(__file__).parents[2] / "src" / "keepleft" / "serving" / "explorer" / "page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
}


class Handler(BaseHTTPRequestHandler):
    explorer: FakeExplorer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].removeprefix("/explore/") or "index.html"
        if name.endswith("favicon.ico"):
            return self._send(204, "image/x-icon", b"")
        path = PAGE / name
        if path.parent != PAGE or not path.is_file():
            return self._send(404, "text/plain", b"not here")
        return self._send(200, CONTENT_TYPES[path.suffix], path.read_bytes())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            answer = self.explorer.ask(self.path.rpartition("/")[2], json.loads(body))
        except RefusedError as error:
            return self._json(
                error.status,
                {"error": {"message": str(error), **({"code": error.code} if error.code else {})}},
            )
        return self._json(200, answer)

    def _json(self, status: int, answer: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(answer).encode())

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "content-type": content_type,
            "content-length": str(len(body)),
            "content-security-policy": POLICY,
            "cache-control": "no-store",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


def serve(explorer: Any, port: int = 0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1, in a thread of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (Handler,), {"explorer": explorer}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--family", default="encoder-decoder")
    options = parser.parse_args()
    server = serve(FakeExplorer(options.family), options.port)
    print(f"http://127.0.0.1:{server.server_port}/explore/")
    while True:
        time.sleep(60)
