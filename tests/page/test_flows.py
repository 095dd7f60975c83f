"""Five flows of the page that every run of the tests takes, where there is Chromium; the others are long."""

from __future__ import annotations

import json
from typing import Any

from tests.page.browser_tab import DEMO, Tab, answers


def test_an_answer_streams_and_can_be_stopped(tab: Tab) -> None:
    tab.page.click(".options summary")
    tab.page.fill("#max_tokens", "20000")

    def endless(route: Any) -> None:
        sent = json.loads(route.request.post_data)
        route.continue_(post_data=json.dumps({**sent, "ignore_eos": True}))

    tab.page.route("**/v1/chat/completions", endless)
    tab.page.fill("#draft", "Go on")
    tab.page.click("#send")
    answer = tab.page.locator(".message.assistant .text").first
    answer.wait_for()
    tab.page.click("#stop")
    tab.page.locator(".message.assistant .foot", has_text="stopped by you").wait_for()
    assert answer.text_content() and tab.page.locator("#send").is_visible()


def test_an_answer_is_tried_again_and_a_message_edited(tab: Tab) -> None:
    first = tab.say("What can you do?")
    tab.page.get_by_role("button", name="Try again").click()
    tab.page.locator(".message.assistant .foot").wait_for()
    assert tab.page.locator(".message").count() == 2
    assert tab.page.locator(".message.assistant .text").text_content() == first
    tab.page.get_by_role("button", name="Edit").click()
    assert tab.page.input_value("#draft") == "What can you do?" and tab.page.locator(".message").count() == 0


def test_200_attacks_of_a_model_and_typed_markup_stay_text(tab: Tab) -> None:
    names = ("img src=x onerror", "svg onload", "iframe src", "a href", "details open ontoggle", "style", "base href")
    calls = ("alert(1)", "javascript:alert(1)", "parent.x=1", "document.body.remove()", "fetch('//e')")
    bait = [
        f"<{n}={c!r}>{t}"
        for n in names
        for c in calls
        for t in ("", "</script><script>alert(1)</script>", "]]>", "-->", "`", "```\n<b>")
    ]
    assert len(bait) >= 200
    tab.page.route("**/v1/chat/completions", answers(*[f"{b}\n" for b in bait]))
    shown = tab.say("<b onclick=alert(1)>typed</b>")
    assert "<svg onload" in shown
    assert tab.page.locator(".message.user .text").text_content() == "<b onclick=alert(1)>typed</b>"
    kinds = tab.page.evaluate("[...new Set([...document.querySelectorAll('#messages *')].map((e) => e.tagName))]")
    assert set(kinds) <= {"LI", "P", "PRE", "DIV", "SPAN", "BUTTON"}


def test_a_chosen_image_shows_its_windows_and_is_described(tab: Tab) -> None:
    tab.page.set_input_files("#file", str(DEMO))
    caption = tab.page.locator(".attached figcaption", has_text="tokens").text_content()
    assert caption == "336 × 224 resized to 252 × 168 · 6 windows of 112 px (4 cut by the edge) · 54 tokens · 384 slots"
    assert "red circle" in tab.say("What is in the picture?")
    foot = tab.page.locator(".message.assistant .foot").text_content()
    assert "54 image tokens in" in foot and "first token" in foot and "tokens/s" in foot
    assert tab.page.locator(".attached li").count() == 0


def test_options_reach_the_request(tab: Tab) -> None:
    seen: list[dict[str, Any]] = []

    def look(route: Any) -> None:
        seen.append(json.loads(route.request.post_data))
        answers("ok")(route)

    tab.page.route("**/v1/chat/completions", look)
    tab.page.click(".options summary")
    for name, value in (("system", "Be brief."), ("temperature", "0.5"), ("top_p", "0.9"), ("seed", "7")):
        tab.page.fill(f"#{name}", value)
    tab.page.fill("#schema", '{"type": "object"}')
    tab.say("Hi")
    sent = seen[0]
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (sent["temperature"], sent["top_p"], sent["seed"]) == (0.5, 0.9, 7) and "max_tokens" not in sent
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
    tab.page.fill("#schema", "{")
    tab.page.fill("#draft", "Hi")
    tab.page.keyboard.press("Enter")
    assert "The schema is not JSON" in (tab.page.locator("#fault").text_content() or "")
    assert tab.page.input_value("#draft") == "Hi" and len(seen) == 1
