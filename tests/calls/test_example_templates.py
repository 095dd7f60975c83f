"""The templates of examples/templates: what they render, and that their own calls read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.calls.test_chat_tools import TOOLS, history
from tests.oracles.openapi_checks import spec_of
from trencadis.server.tools.parser_registry import TOOL_PARSERS, find_tool_parser
from trencadis.server.tools.tool_parser import CallArguments, CallStarted

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "templates"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
EXPECTED = {
    "qwen2_5_vl_hermes": ("hermes", "<|im_start|>user\n<tool_response>\n5 degrees\n</tool_response><|im_end|>\n"),
    "llama3_json": ("llama3_json", "<|start_header_id|>ipython<|end_header_id|>\n\n5 degrees<|eot_id|>"),
    "mistral": ("mistral", '[TOOL_RESULTS] {"content": "5 degrees", "call_id": "abcdefghi"}[/TOOL_RESULTS]'),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_renders_a_conversation_with_calls(serve: Any, name: str) -> None:
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    style, result = EXPECTED[name]
    assert find_tool_parser("auto", source) is TOOL_PARSERS[style]
    harness = serve(source)
    assert harness.service.template.has_all_specials_marked() and not harness.service.template.text_arguments
    conversation = [{"role": "system", "content": "Be brief."}, *history(), {"role": "assistant", "content": "Five."},
            {"role": "user", "content": "And now?"}]  # fmt: skip
    assert harness.call("/v1/chat/completions", {"messages": conversation, "tools": TOOLS[2:]}).status_code == 200
    shown = harness.tokenizer.decode(harness.engine.submitted[0][0].tokens, False)
    assert result in shown and shown.count("Be brief.") == 1 and shown.count('"description": "d"') == 1
    start = shown.index("abcdefghi") if style == "mistral" else len(shown)
    begin = {"hermes": '<tool_call>\n{"name": "get_weather"', "llama3_json": '{"name": "get_weather", "param'}
    at = shown.index("[TOOL_CALLS]") if style == "mistral" else shown.index(begin[style])
    events = TOOL_PARSERS[style]({"get_weather": {}}).feed(shown[at : max(start, at) + 99])
    assert next(e.name for e in events if isinstance(e, CallStarted)) == "get_weather"
    assert "".join(e.text for e in events if isinstance(e, CallArguments)) == '{"city": "Köln <b>"}'


def test_the_template_of_qwen2_5_vl_takes_images_in_every_message(serve: Any) -> None:
    harness = serve((FOLDER / "qwen2_5_vl_hermes.jinja").read_text(encoding="utf-8"))
    conversation = history([{"type": "text", "text": "map"}, IMAGE])
    conversation[0]["content"] = [IMAGE, {"type": "text", "text": "Where?"}]
    assert harness.call("/v1/chat/completions", {"messages": conversation}).status_code == 200
    shown = harness.tokenizer.decode(harness.engine.submitted[0][0].tokens, False)
    assert "<tool_response>\nmap<|vision_start|><|image_pad|>" in shown and "<|vision_end|>Where?<|im_end|>" in shown
    assert "# Tools" not in shown and harness.images.received[1][1] == "messages[2].content[1]"


def test_the_template_of_vlm2vec_joins_the_parts_of_one_message(serve: Any) -> None:
    harness = serve((FOLDER / "vlm2vec.jinja").read_text(encoding="utf-8"))
    text = {"type": "text", "text": "Represent the given image."}
    parts = [IMAGE, text, IMAGE, {"type": "text", "text": "Where <|im_end|>?"}]
    made = harness.call("/tokenize", {"messages": [{"role": "user", "content": parts}]}).json()["tokens"]
    pad = "<|image_pad|>" * 6
    assert harness.tokenizer.decode(made, False) == f"{pad} Represent the given image. {pad} Where <|im_end|>?"
    assert harness.tokenizer.special_ids & {*made} == {harness.tokenizer.find_token_id("<|image_pad|>")}
    plain = harness.call("/tokenize", {"messages": [{"role": "user", "content": "A dog"}]}).json()["tokens"]
    assert harness.tokenizer.decode(plain, False) == "A dog"
    two = harness.call(
        "/tokenize", {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}
    )
    assert two.status_code == 400 and "one message" in two.json()["error"]["message"]
    assert find_tool_parser("auto", harness.service.template.text) is None


def test_the_openapi_page_describes_calls_and_reasoning(serve: Any) -> None:
    schemas = spec_of(serve("{{ messages }}").made)["components"]["schemas"]
    assert {"tool_calls", "reasoning", "reasoning_content"} <= set(schemas["Message"]["properties"])
    assert set(schemas["CalledFunction"]["required"]) == {"name", "arguments"}
    assert "reasoning_tokens" in schemas["CompletionTokensDetails"]["properties"]
    assert "include_reasoning" in schemas["ChatRequest"]["properties"]
