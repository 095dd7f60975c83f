"""Images reach a message in every way, and show how the model sees them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from tests.page.browser_tab import Tab, files, png
from trencadis.multimodal.qwen2_5_vl.window_packing import window_layout
from trencadis.multimodal.qwen2_vl.smart_resize import smart_resize

pytestmark = pytest.mark.long

DROP = """([data, type, kind]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], "given.png", { type: "image/png" }));
  const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true })
    : new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
  document.getElementById("draft").dispatchEvent(event);
}"""


@pytest.mark.parametrize("kind", ["drop", "paste"])
def test_an_image_is_dropped_or_pasted(tab: Tab, kind: str) -> None:
    tab.page.evaluate(DROP, [base64.b64encode(png(150, 100)).decode(), "image/png", kind])
    tab.page.locator(".attached figcaption", has_text="20 tokens").wait_for()


def test_an_image_is_taken_with_the_camera(tab: Tab) -> None:
    tab.page.click("#camera")
    tab.page.locator("#camera-dialog[open]").wait_for()
    tab.page.wait_for_timeout(1000)
    tab.page.click("#shoot")
    tab.page.locator(".attached figcaption", has_text="640 × 480").wait_for()
    assert tab.page.evaluate("document.getElementById('viewfinder').srcObject") is None


def test_ten_images_travel_in_one_message(tab: Tab) -> None:
    tab.page.set_input_files("#file", files(*[(60 + 30 * i, 90) for i in range(10)]))
    tab.page.locator(".attached figcaption", has_text="tokens").nth(9).wait_for()
    assert tab.say("What colours?")
    assert tab.page.locator(".message.user canvas").count() == 10


def test_an_image_is_removed_and_what_is_no_image_is_named(tab: Tab) -> None:
    tab.page.set_input_files("#file", files((80, 80), (90, 90)))
    tab.page.locator(".attached button").nth(1).wait_for()
    tab.page.get_by_label("Remove p0.png").click()
    assert tab.page.locator(".attached li").count() == 1
    tab.page.set_input_files("#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"hello"})
    fault = tab.page.locator("#fault")
    fault.wait_for()
    assert fault.text_content() == "notes.txt is no image that this browser can read."


def test_the_mosaic_is_the_windows_of_the_plan_for_200_sizes(tab: Tab) -> None:
    rng = np.random.default_rng(0)
    cases: list[dict[str, Any]] = []
    for _ in range(200):
        wide, high = (int(v) for v in rng.integers(28, 2000, 2))
        high = max(high, wide // 50)
        height, width = smart_resize(high, max(wide, high // 50), 28, 56 * 56, 1280 * 28 * 28)
        cases.append({"width": width, "height": height, "grid": [1, height // 14, width // 14]})
    script = (
        "async (c) => { const m = await import('/page/mosaic.js'); return c.map((s) => [m.windows(s), m.slots(s)]) }"
    )
    for case, (parts, slots) in zip(cases, tab.page.evaluate(script, cases), strict=True):
        layout = window_layout(case["grid"][1], case["grid"][2])
        assert slots == len(layout.patch)
        assert [p["width"] * p["height"] // 196 for p in parts] == layout.count.tolist()
        assert [p["edge"] for p in parts] == (layout.count < 64).tolist()


def test_a_model_of_text_alone_is_offered_no_images(tab: Tab) -> None:
    tab.page.route("**/stats", lambda route: route.fulfill(json={"takes_images": False}))
    tab.open()
    tab.page.locator("#camera").wait_for(state="hidden")
    assert tab.page.locator("#attach").is_hidden()
    tab.page.evaluate(DROP, [base64.b64encode(png(150, 100)).decode(), "image/png", "drop"])
    tab.page.locator("#fault", has_text="This model takes no images.").wait_for()
    assert tab.page.locator(".attached li").count() == 0
