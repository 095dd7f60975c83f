"""The terminal chat, and the request that ``make serve`` prints."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest

import trencadis
from tools import serve_demo
from trencadis.core.errors import StartupError
from trencadis.server.cli import chat_and_complete_commands as chat_cli

ROOT = Path(trencadis.__file__).resolve().parent.parent


def server(seen, status=200):
    """A transport that answers like the API and keeps the bodies it got."""

    def answer(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}, {"id": "second"}]})
        seen.append(json.loads(request.content))
        if status != 200:
            return httpx.Response(status, json={"error": {"message": "no room", "code": status}})
        pieces = [{"choices": [{"delta": {"content": c}}]} for c in ("He", "llo")] + [{"choices": []}]
        lines = [f"data: {json.dumps(p)}\n\n" for p in pieces] + [": ping\n\n", "data: [DONE]\n\n"]
        return httpx.Response(200, content="".join(lines).encode())

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x")


def test_a_conversation_with_an_image(tmp_path):
    one_image = tmp_path / "p.png"
    one_image.write_bytes(b"png")
    seen = []
    client = server(seen)
    chat = chat_cli.ChatSession(client, chat_cli.get_first_model(client), {"max_tokens": 5}, "be kind")
    chat.images = [one_image]
    assert "".join(chat.ask("what?")) == "Hello" and "".join(chat.ask("sure?")) == "Hello"
    first, second = seen
    assert (first["model"], first["max_tokens"], first["stream"]) == ("first", 5, True)
    image, text = first["messages"][1]["content"]
    assert image["image_url"]["url"] == "data:image/*;base64," + base64.b64encode(b"png").decode()
    assert text == {"type": "text", "text": "what?"}
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][3]["content"] == "sure?"


def test_errors_are_one_line(tmp_path):
    chat = chat_cli.ChatSession(server([], 429), "m", {})
    with pytest.raises(StartupError, match="answered 429: no room"):
        list(chat.ask("x"))
    chat.images = [tmp_path / "none.png"]
    with pytest.raises(StartupError, match=r"none\.png: No such file"):
        list(chat.ask("x"))
    with pytest.raises(StartupError, match="no server answers at http:"):
        chat_cli.main(["--url", "http://127.0.0.1:9", "hello"])


def test_the_printed_request_is_valid_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_demo, "ROOT", tmp_path)
    monkeypatch.setattr(serve_demo, "DEMO_IMAGE", "it's a picture.png")
    (tmp_path / serve_demo.DEMO_IMAGE).write_bytes(bytes(range(256)) * 1000)
    curl = tmp_path / "curl"
    curl.write_text("#!/bin/sh\ncat\n")
    curl.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    line = serve_demo.request("http://127.0.0.1:1", "m")
    out = subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, check=True)
    image, text = json.loads(out.stdout)["messages"][0]["content"]
    assert base64.b64decode(image["image_url"]["url"].partition(",")[2]) == bytes(range(256)) * 1000
    assert text["text"] == serve_demo.QUESTION
