"""Fields of OpenAI's, Anthropic's and vLLM's requests, each with values that a client may send.

A field maps to its values; a value may stand beside others, without which it means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TALK = [{"role": "user", "content": "One two three four"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SEEN = [{"role": "user", "content": [{"type": "text", "text": "One two"}, IMAGE]}]
ANSWERED = [*TALK, {"role": "assistant", "content": "So"}]
ALL_USAGE = {"include_usage": True, "continuous_usage_stats": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
TOOLS = {"tools": [TOOL]}
TAG = '{"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}'
TEMPLATE = "{{ messages[0].content }}!"


@dataclass(frozen=True)
class Case:
    """A value of a field.

    Args:
        beside: other fields that it stands beside.
        shown: the value as the page writes it, where it is long.
        same: why nothing changes, where nothing does: the value is the default, or what it asks for is always done.
        flags: flags of the server.
    """

    value: Any
    beside: Mapping[str, Any] = field(default_factory=dict)
    shown: str = ""
    same: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)


Cases = dict[str, list[Case]]


def one(
    value: Any, shown: str = "", same: str = "", flags: Mapping[str, Any] | None = None, **beside: Any
) -> list[Case]:
    """A field with one value."""
    return [Case(value, beside, shown, same, flags or {})]


def effort(*values: str, **beside: Any) -> list[Case]:
    """One case for each of some words."""
    return [Case(value, beside) for value in values]


SAMPLING: Cases = {
    "temperature": one(0.5),
    "top_p": one(0.5),
    "top_k": one(5),
    "min_p": one(0.5),
    "n": one(2),
    "best_of": [Case(2, {"n": 2}, same="n answers are returned"), Case(3, {"n": 2})],
    "stop": [Case("swer"), Case(["swer", "x"]), Case([*"abcdefghijklmnop"], shown="16 strings")],
    "stop_token_ids": one([300]),
    "include_stop_str_in_output": one(True, stop="swer", max_tokens=100),
    "ignore_eos": one(True, max_tokens=40),
    "min_tokens": one(2),
    "seed": one(3),
    "presence_penalty": one(0.5),
    "frequency_penalty": one(0.5),
    "repetition_penalty": one(1.5),
    "length_penalty": one(0.5, use_beam_search=True, n=2, temperature=0),
    "early_stopping": one(True, use_beam_search=True, n=2, temperature=0),
    "use_beam_search": one(True, n=2, temperature=0),
    "typical_p": one(0.5),
    "logit_bias": one({"5": 1}),
    "prompt_logprobs": one(1),
    "logprob_token_ids": one([300, 301]),
    "allowed_token_ids": one([300, 301]),
    "bad_words": one(["answer"]),
    "thinking_token_budget": one(5),
    "repetition_detection": one({"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 3}),
    "watermarking": one({"ratio": 0.5}),
    "skip_special_tokens": one(False),
    "spaces_between_special_tokens": [Case(True, same="the default"), Case(False)],
    "truncate_prompt_tokens": one(3),
    "truncation_side": one("right", truncate_prompt_tokens=3),
    "stream": one(True),
    "stream_options": [
        Case({"include_usage": True}, {"stream": True}), Case(ALL_USAGE, {"stream": True}),
        Case({"include_obfuscation": False}, {"stream": True}),
    ],
    "stream_interval": one(4, stream=True),
    "priority": [Case(4), Case(4, flags={"priorities": True})],
    "request_id": one("mine"),
    "session_id": one("mine"),
    "cache_salt": one("s"),
    "skip_reading_prefix_cache": one(True),
    "return_token_ids": one(True),
    "return_prompt_text": one(True),
    "return_token_offsets": one(True),
    "kv_transfer_params": one({"a": 1}),
    "ec_transfer_params": one({"a": 1}),
    "vllm_xargs": one({"a": 1}),
    "logits_processors": one(["x"]),
    "prompt_embeds": one("AAAA"),
    "structured_outputs": [
        Case({"json": SCHEMA}, shown='{"json": ...}'), Case({"regex": "a+"}), Case({"choice": ["yes", "no"]}),
        Case({"grammar": 'start: "a"'}), Case({"json_object": True}),
    ],
    "guided_json": one(SCHEMA, "a schema"),
    "guided_regex": one("a+"),
    "guided_choice": one(["yes", "no"]),
    "guided_grammar": one('start: "a"'),
    "guided_whitespace_pattern": one(" ?", guided_json=SCHEMA),
    "guided_decoding_backend": one("auto", guided_json=SCHEMA),
    "structural_tag": one(TAG, shown="a structural tag"),
    "user": one("u"),
    "return_mm_kwargs": one(True),
    "return_weight_versions": one(True),
    "routed_experts_prompt_start": one(1),
    "mm_processor_kwargs": one({"max_pixels": 9000}),
    "media_io_kwargs": one({"image": {}}),
    "return_image_sizes": one(True),
}  # fmt: skip
CHAT: Cases = SAMPLING | {
    "messages": one(SEEN, "text and an image"),
    "model": [Case("alias"), Case("nope")],
    "max_tokens": one(2),
    "max_completion_tokens": one(2),
    "logprobs": one(True),
    "top_logprobs": one(2, logprobs=True),
    "response_format": [
        Case({"type": "text"}, same="the default"), Case({"type": "json_object"}),
        Case({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
             shown='{"type": "json_schema", ...}'),
        Case({"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
              "triggers": ["<f"]}, shown='{"type": "structural_tag", ...}'),
    ],
    "tools": [Case([TOOL], shown="a function"), Case([STRICT], shown="a function with strict"),
              Case([{"type": "web_search"}])],
    "tool_choice": [
        Case("auto", TOOLS, same="the default"), Case("none", TOOLS), Case("required", TOOLS),
        Case({"type": "function", "function": {"name": "f"}}, TOOLS, shown="a named function"),
        Case({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "f"}}]}}, TOOLS, shown="some of the functions"),
    ],
    "parallel_tool_calls": [Case(False, TOOLS), Case(True, TOOLS, same="the default"), Case(False)],
    "functions": one([{"name": "f"}]),
    "function_call": one("auto"),
    "reasoning_effort": effort("none", "low", "high"),
    "include_reasoning": one(False),
    "chat_template_kwargs": [Case({"style": "brief"}), Case({"unknown": 1})],
    "chat_template": [Case(TEMPLATE), Case(TEMPLATE, flags={"trust_request_chat_template": True})],
    "documents": one([{"text": "d"}]),
    "add_generation_prompt": one(False),
    "continue_final_message": one(True, messages=ANSWERED, add_generation_prompt=False),
    "add_special_tokens": one(True),
    "echo": one(True, messages=ANSWERED, add_generation_prompt=False, continue_final_message=True),
    "return_tokens_as_token_ids": one(True, logprobs=True),
    "modalities": [Case(["text"], same="the default"), Case(["text", "audio"])],
    "audio": one({"voice": "x", "format": "wav"}),
    "service_tier": one("flex"),
    "store": one(True),
    "metadata": one({"a": "b"}),
    "prediction": one({"type": "content", "content": "x"}),
    "verbosity": one("low"),
    "web_search_options": one({"search_context_size": "low"}),
    "moderation": one({"model": "x"}),
    "safety_identifier": one("u"),
    "prompt_cache_key": one("k"),
    "prompt_cache_options": one({"ttl": "1h"}),
    "prompt_cache_retention": one("24h"),
    "mm_processor_kwargs": one({"max_pixels": 9000}, messages=SEEN),
    "return_image_sizes": one(True, messages=SEEN),
    "mm_payload": one({"a": 1}),
}  # fmt: skip
COMPLETIONS: Cases = SAMPLING | {
    "prompt": [Case("Other"), Case(["a", "b"]), Case([65, 66]), Case([[65], [66]])],
    "model": [Case("alias"), Case("nope")],
    "max_tokens": one(2),
    "logprobs": one(1),
    "echo": one(True),
    "suffix": one("x"),
    "add_special_tokens": one(False),
    "return_tokens_as_token_ids": one(True, logprobs=2),
    "response_format": [
        Case({"type": "json_object"}),
        Case({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
             shown='{"type": "json_schema", ...}'),
    ],
}  # fmt: skip
TOKENIZE: Cases = {
    "model": [Case("alias", same="the same tokens"), Case("nope")],
    "prompt": one("Other", messages=None),
    "messages": one(SEEN, "text and an image"),
    "add_special_tokens": [Case(False, {"prompt": "Hi", "messages": None}), Case(True)],
    "return_token_strs": one(True),
    "add_generation_prompt": one(False),
    "continue_final_message": one(True, messages=ANSWERED, add_generation_prompt=False),
    "chat_template": [Case(TEMPLATE), Case(TEMPLATE, flags={"trust_request_chat_template": True})],
    "chat_template_kwargs": one({"style": "brief"}),
    "tools": one([TOOL], "a function"),
    "cache_salt": one("s", same="tokens do not depend on it"),
    "mm_processor_kwargs": one({"max_pixels": 9000}, messages=SEEN),
    "return_image_sizes": one(True, messages=SEEN),
}
DETOKENIZE: Cases = {"model": [Case("alias", same="the same text"), Case("nope")], "tokens": one([66])}
