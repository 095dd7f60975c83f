"""Fields of the routes beside chat and completions: Responses, Messages, pooling; and routes without fields of note."""

from __future__ import annotations

from dataclasses import replace

from tests.compat.fields import SCHEMA, SEEN, TALK, TEMPLATE, Case, Cases, one

FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
IMAGE_PART = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
RESPONSES: Cases = {
    "model": [Case("alias"), Case("nope")],
    "input": [
        Case("Other"), Case([{"role": "user", "content": [{"type": "input_text", "text": "See"}, IMAGE_PART]}],
                            shown="a message with an image"),
        Case([*TALK, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
              {"type": "function_call_output", "call_id": "c", "output": "5"}], shown="a call and its result"),
    ],
    "instructions": one("Be brief."),
    "max_output_tokens": one(16),
    "temperature": one(0.5),
    "top_p": one(0.5),
    "top_k": one(5),
    "top_logprobs": one(2, include=["message.output_text.logprobs"]),
    "include": [Case(["message.output_text.logprobs"]), Case(["reasoning.encrypted_content"])],
    "stream": one(True),
    "stream_options": one({"include_obfuscation": False}, same="events are never padded", stream=True),
    "text": [
        Case({"format": {"type": "text"}}, same="the default"), Case({"format": {"type": "json_object"}}),
        Case({"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}, shown="a JSON schema"),
        Case({"verbosity": "low"}),
    ],
    "tools": [Case([FUNCTION], shown="a function"), Case([{"type": "web_search"}]), Case([{"type": "mcp"}])],
    "tool_choice": [
        Case("none", {"tools": [FUNCTION]}), Case("required", {"tools": [FUNCTION]}),
        Case({"type": "function", "name": "f"}, {"tools": [FUNCTION]}, shown="a named function"),
    ],
    "parallel_tool_calls": one(False, tools=[FUNCTION]),
    "max_tool_calls": one(1, tools=[FUNCTION]),
    "reasoning": [Case({"effort": "low"}), Case({"summary": "auto"})],
    "truncation": [Case("disabled", same="the default"), Case("auto")],
    "metadata": one({"a": "b"}),
    "user": one("u"),
    "safety_identifier": one("u"),
    "prompt_cache_key": one("k"),
    "prompt_cache_options": one({"ttl": "1h"}),
    "prompt_cache_retention": one("24h"),
    "service_tier": one("flex"),
    "store": [Case(False, same="answers are never stored"), Case(True)],
    "background": one(True),
    "previous_response_id": one("resp_1"),
    "conversation": one("conv_1"),
    "prompt": one({"id": "pmpt_1"}, "a stored prompt"),
    "context_management": one([{"type": "compaction"}]),
    "moderation": one({"model": "x"}),
    "access_programs": one(["x"]),
    "background_options": one({"a": 1}),
    "image": one({"a": 1}),
    "seed": one(3),
    "stop": one(["swer"]),
    "cache_salt": one("s"),
    "priority": one(4),
    "request_id": one("mine"),
}  # fmt: skip
CLAUDE = {"name": "f", "input_schema": SCHEMA}
BOTH: Cases = {
    "model": [Case("alias"), Case("nope")],
    "messages": [
        Case([{"role": "user", "content": [{"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "AAAA"}}]}], shown="an image in base64"),
        Case([{"role": "user", "content": [{"type": "image", "source": {
            "type": "url", "url": "https://example.org/a.png"}}]}], shown="an image's URL"),
        Case([{"role": "user", "content": [{"type": "document", "source": {
            "type": "text", "media_type": "text/plain", "data": "x"}}]}], shown="a document"),
        Case([*TALK, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
              {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}]}],
             shown="tool_use and tool_result"),
    ],
    "system": [Case("Be brief."), Case([{"type": "text", "text": "Be brief."}], shown="a list of texts")],
    "tools": [Case([CLAUDE], shown="a function"), Case([{"type": "web_search_20250305", "name": "web_search"}])],
    "tool_choice": [
        Case({"type": "auto"}, {"tools": [CLAUDE]}, same="the default"), Case({"type": "none"}, {"tools": [CLAUDE]}),
        Case({"type": "any"}, {"tools": [CLAUDE]}), Case({"type": "tool", "name": "f"}, {"tools": [CLAUDE]}),
        Case({"type": "auto", "disable_parallel_tool_use": True}, {"tools": [CLAUDE]}),
    ],
    "thinking": [Case({"type": "enabled", "budget_tokens": 1024}, {"max_tokens": 900}), Case({"type": "disabled"}),
                 Case({"type": "adaptive"}, same="the template decides, as without it")],
    "cache_control": one({"type": "ephemeral"}, same="prefixes are cached in any case"),
    "output_config": one({"effort": "low"}),
    "speed": one("fast"),
    "user_profile_id": one("u"),
    "workspace_id": one("w"),
    "mcp_servers": one([{"type": "url", "url": "https://example.org", "name": "x"}], "a server"),
    "context_management": one({"edits": []}),
}  # fmt: skip
MESSAGES: Cases = BOTH | {
    "max_tokens": one(2),
    "temperature": one(0.5),
    "top_p": one(0.5),
    "top_k": one(5),
    "stop_sequences": one(["swer"]),
    "stream": one(True),
    "metadata": one({"user_id": "u"}),
    "service_tier": one("auto"),
    "container": one("c"),
    "inference_geo": one("eu"),
    "diagnostics": one({"a": 1}),
    "cache_salt": one("s"),
    "priority": one(4),
    "seed": one(3),
}
COUNTED: Cases = BOTH | {
    name: [replace(case, same=case.same or "the same count") for case in BOTH[name]]
    for name in ("model", "tool_choice")
}
POOLED: Cases = {
    "model": [Case("alias"), Case("nope")],
    "truncate_prompt_tokens": one(3),
    "truncation_side": one("right", truncate_prompt_tokens=3),
    "add_special_tokens": one(False),
    "priority": one(4),
    "request_id": one("mine"),
    "cache_salt": one("s"),
    "user": one("u"),
    "temperature": one(0.5),
    "use_activation": one(False),
}
VECTORS: Cases = POOLED | {
    "input": [Case("Other"), Case(["a", "b"]), Case([65, 66]), Case([[65], [66]])],
    "messages": one(TALK, "a conversation", input=None),
    "encoding_format": [Case("float", same="the default"), Case("base64"), Case("bytes"), Case("bytes_only")],
    "dimensions": one(8),
    "embed_dtype": [Case("float32", same="the default"), Case("float16", {"encoding_format": "base64"})],
    "endianness": [Case("native", same="the default"), Case("big", {"encoding_format": "base64"})],
    "chat_template": one(TEMPLATE, input=None, messages=TALK),
    "chat_template_kwargs": one({"style": "brief"}, input=None, messages=TALK),
    "add_generation_prompt": one(True, input=None, messages=TALK),
}  # fmt: skip
POOLING: Cases = VECTORS | {"task": [Case("embed", same="the default"), Case("classify"), Case("token_embed")]}
COHERE: Cases = {
    "texts": [Case("Other"), Case(["a", "b"])],
    "images": one(["data:image/png;base64,AAAA"], texts=None),
    "inputs": one([{"content": SEEN[0]["content"]}], texts=None),
    "embedding_types": [Case(["float"], same="the default"), Case(["binary"]), Case(["ubinary"]), Case(["base64"])],
    "output_dimension": one(8),
    "truncate": [Case("END", same="the default"), Case("START", {"max_tokens": 3}), Case("NONE", {"max_tokens": 3})],
    "max_tokens": one(3),
    "input_type": one("search_query"),
}
CLASSIFY: Cases = POOLED | {"input": [Case("Other"), Case(["a", "b"])], "messages": one(TALK, input=None)}
SCORE: Cases = POOLED | {
    "queries": one("Other"),
    "documents": one(["a", "b"]),
    "instruction": one("Judge."),
}
RERANK: Cases = POOLED | {
    "query": one("Other"),
    "documents": one(["a", "b"]),
    "top_n": one(1),
    "return_documents": one(False),
    "instruction": one("Judge."),
}
PLAIN: list[tuple[str, str, str]] = [
    ("GET", "/health", "whether the server takes requests"),
    ("GET", "/ping", "SageMaker's name of it"),
    ("POST", "/ping", ""),
    ("GET", "/ready", "whether warm-up is done too"),
    ("GET", "/live", "whether an orchestrator should restart the process"),
    ("GET", "/version", ""),
    ("GET", "/metrics", "Prometheus"),
    ("GET", "/buckets", "shapes, their use, the graphs"),
    ("POST", "/buckets/learn", "searches shapes for the traffic so far"),
    ("GET", "/v1/models", ""),
    ("GET", "/v1/models/m", "one model"),
    ("GET", "/load", "requests that are running"),
    ("GET", "/tokenizer_info", ""),
    ("GET", "/openapi.json", "what this page is held against"),
    ("POST", "/invocations", "SageMaker: any request, by its fields"),
    ("POST", "/v1/chat/completions/batch", "several conversations"),
    ("GET", "/v1/responses/resp_1", "a stored answer"),
    ("POST", "/v1/responses/resp_1/cancel", ""),
    ("GET", "/server_info", "with `VLLM_SERVER_DEV_MODE`"),
    ("POST", "/reset_prefix_cache", "with `VLLM_SERVER_DEV_MODE`"),
    ("POST", "/reset_mm_cache", "with `VLLM_SERVER_DEV_MODE`"),
    ("POST", "/sleep", "with `--enable-sleep-mode`"),
    ("POST", "/wake_up", "with `--enable-sleep-mode`"),
    ("POST", "/start_profile", "a profiler"),
    ("POST", "/v1/load_lora_adapter", "adapters at run time"),
    ("POST", "/v1/audio/transcriptions", "models that hear"),
    ("POST", "/v1/audio/translations", "models that hear"),
    ("POST", "/v1/audio/speech", "models that speak"),
    ("POST", "/v1/images/generations", "models that draw"),
    ("POST", "/v1/moderations", ""),
    ("POST", "/generative_scoring", ""),
    ("POST", "/v1/chat/completions/render", "prompts for vLLM's split prefill"),
    ("POST", "/inference/v1/generate", "vLLM's split prefill"),
    ("POST", "/cohere/v2/chat", "Cohere's chat"),
    ("POST", "/v1/decisions", "answers chosen by vLLM's grammar of decisions"),
    ("POST", "/pause", "training with the weights of a running server"),
    ("POST", "/update_weights", "training with the weights of a running server"),
    ("POST", "/collective_rpc", "calls into ranks"),
    ("GET", "/v1/files", "stored files"),
    ("GET", "/v1/batches", "stored batches"),
    ("GET", "/api/tags", "Ollama's list of models"),
]
"""(method, path, what it is for)."""
