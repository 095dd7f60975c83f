"""A tab of a browser that shows the page, and what tests put into it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from trencadis.assets import demo_path

FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", "128MiB", "--limit-mm-per-prompt", "image=10")
DEMO = demo_path().parent / "demo_picture.png"


class Tab:
    """One page in a browser context of its own, with all that it complained about or asked of others."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(30_000)
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        self.url = url
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._requests)

    def _heard(self, message: Any) -> None:
        # The browser itself reports each status of 400 and more; what the page says of them is tested.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.complaints.append(message.text)

    def _requests(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.foreign.append(request.url)

    def open(self, up: bool = True) -> Any:
        self.page.goto(self.url)
        if up:
            self.page.locator("#dot.good").wait_for()
        return self.page

    def say(self, text: str) -> str:
        """Sends a message; returns the whole answer."""
        before = self.page.locator(".message.assistant").count()
        self.page.fill("#draft", text)
        self.page.keyboard.press("Enter")
        answer = self.page.locator(".message.assistant").nth(before)
        answer.locator(".foot").wait_for()
        return "\n".join(answer.locator(".text, pre, .fault").all_text_contents())

    def close(self) -> None:
        self.context.close()
        assert not self.complaints and not self.foreign, (self.complaints, self.foreign)


def png(width: int, height: int, seed: int = 0) -> bytes:
    out = io.BytesIO()
    colour = tuple(int(v) for v in np.random.default_rng(seed).integers(0, 255, 3))
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


def files(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"name": f"p{i}.png", "mimeType": "image/png", "buffer": png(w, h, i)} for i, (w, h) in enumerate(sizes)]


def answers(*texts: str, finish: str = "stop") -> Callable[[Any], None]:
    """A route handler that streams ``texts`` as a model would write them."""
    deltas = [{"content": t} for t in texts]
    events = [{"choices": [{"index": 0, "delta": d}]} for d in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    body = "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n"
    return lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body)
