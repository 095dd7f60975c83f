"""A reverse proxy on loopback that strips a prefix, as an operator's does."""

from __future__ import annotations

import contextlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def prefix_proxy(inner: str, prefix: str) -> Iterator[str]:
    """Serves what lies below ``prefix`` from the server at ``inner``; yields the proxy's address."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                return self.send_error(404)
            size = int(self.headers.get("content-length") or 0)
            kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
            body = self.rfile.read(size) if size else None
            requested = urllib.request.Request(inner + self.path[len(prefix) :], body, kept, method=self.command)
            try:
                got = urllib.request.urlopen(requested)
            except urllib.error.HTTPError as error:
                got = error
            self.send_response(got.status)
            for name, value in got.headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "date"):
                    self.send_header(name, value)
            self.end_headers()
            while data := got.read1(65536):
                self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
