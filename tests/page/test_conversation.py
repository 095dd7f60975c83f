"""A conversation on the page: streams, stops, options; what a model writes stays text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.page.browser_tab import DEMO, Tab, answers

pytestmark = pytest.mark.long


def test_a_conversation_goes_on_and_is_cleared(tab: Tab) -> None:
    tab.page.set_input_files("#file", str(DEMO))
    tab.page.locator(".attached figcaption", has_text="tokens").wait_for()
    tab.say("What is in the picture?")
    assert tab.say("How many shapes are there?") == "Three."
    assert "cached" in (tab.page.locator(".message.assistant .foot").nth(1).text_content() or "")
    tab.page.click(".options summary")
    tab.page.click("#clear")
    assert tab.page.locator(".message").count() == 0 and tab.page.locator("#empty").is_visible()


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


def test_the_request_as_a_command_and_as_a_program(tab: Tab) -> None:
    tab.page.fill("#draft", "It's 'quoted' '''here'''")
    tab.page.click(".options summary")
    tab.page.click("#as-curl")
    text = tab.page.locator("#snippet").text_content() or ""
    assert text.startswith(f"curl {tab.url}v1/chat/completions") and "It'\\''s" in text
    tab.page.get_by_role("button", name="Close").click()
    tab.page.click("#as-python")
    code = tab.page.locator("#snippet").text_content() or ""
    compile(code, "snippet", "exec")
    request = json.loads(code.partition("r'''\n")[2].partition("\n''')")[0])
    assert request["messages"][0]["content"] == "It's 'quoted' '''here'''"


def test_code_between_fences_is_set_apart(tab: Tab) -> None:
    tab.page.route("**/v1/chat/completions", answers("See:\n```python\nx = 1 <", " 2\n```\nDone."))
    tab.say("Code?")
    assert tab.page.locator(".message.assistant pre").text_content() == "x = 1 < 2"
    assert tab.page.locator(".message.assistant .text").all_text_contents() == ["See:", "Done."]
