"""A conversation on the page: streams, stops, options; what a model writes stays text."""

from __future__ import annotations

import json

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
