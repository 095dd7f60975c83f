"""A collector of OTLP/HTTP on loopback: keeps what it is sent, and answers as a test wants."""

from __future__ import annotations

import gzip
import http.server
import threading
from typing import Any


class Collector(http.server.ThreadingHTTPServer):
    """Decodes what arrives at ``/v1/traces``; ``answer`` may be another than OTLP's."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.answer: Any = self.take
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, handler: Any) -> None:
        handler.send_response(200)
        handler.send_header("content-length", "0")
        handler.end_headers()

    def spans(self) -> list[Any]:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in self.bodies:
            sent = ExportTraceServiceRequest.FromString(body)
            found += [span for r in sent.resource_spans for scope in r.scope_spans for span in scope.spans]
        return found

    def close(self) -> None:
        """Ends the collector."""
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is part of the tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        assert self.path == "/v1/traces"
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        self.server.answer(self)  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None:
        pass
