"""Configuration of the API process, besides the engine's; each field is a flag."""

from __future__ import annotations

from dataclasses import dataclass

from trencadis.core.flag_declaration import BYTES, COUNT, MOST_BYTES, NOT_NEGATIVE, SECONDS, SOME_SECONDS, Bound, opt
from trencadis.core.json_types import JsonObject
from trencadis.multimodal.media_parts_and_mm_processor_kwargs import MAX_CLIP_FRAMES, MAX_CLIP_SECONDS


@dataclass(frozen=True)
class ServerConfig:
    """The options of the HTTP server (``max_num_queued_reqs`` is ``--max-num-queued-reqs``)."""

    host: str = opt("", "address to listen on (default: all)")
    port: int = opt(8000, "port to listen on; 0: any free one", bound=Bound(0, 65535))
    uds: str = opt("", "listen on this unix socket instead")
    api_key: list[str] = opt([], "keys that clients may send", env=("VLLM_API_KEY",), secret=True)
    api_key_file: str = opt(
        "",
        "YAML file of tenants: names, digests of keys, weights, limits; read again when it changes and on SIGHUP",
    )
    data_parallel_size: int = opt(
        1, "engines in one server, each with its own cards (a CPU is shared); a router sends each request to one",
        aliases=("dp",), bound=Bound(1, 1024),
    )  # fmt: skip
    api_server_count: int = opt(
        1, "processes that answer requests, over the same engines; limits and /metrics are those of all together",
        aliases=("asc",), bound=Bound(1, 64),
    )  # fmt: skip
    data_parallel_backend: str = opt(
        "mp", "where the engines are: mp: processes of this machine; ray: actors of a Ray cluster",
        choices=("mp", "ray"), aliases=("dpb",),
    )  # fmt: skip
    served_model_name: list[str] = opt([], "names in the API; metrics use the first (default: the model as named)")
    chat_template: str = opt("", "Jinja file, or the template's text (default: the model's)")
    chat_template_content_format: str = opt(
        "auto", "how message content reaches the template", choices=("auto", "string", "openai")
    )
    default_chat_template_kwargs: JsonObject = opt({}, "JSON: variables for the chat template", kind="json")
    reasoning_effort_map: dict[str, str] = opt(
        {}, 'JSON: what the template sees for a reasoning effort of a request, {"medium": "low"}', kind="json"
    )
    trust_request_chat_template: bool = opt(False, "let requests bring a chat template")
    tool_call_parser: str = opt(
        "auto",
        "form in which the model writes tool calls: hermes, qwen3, llama3_json, mistral, pythonic, lfm2, openai, "
        "gemma4, the name of a parser of an installed package, or auto: as the chat template shows",
    )
    reasoning_parser: str = opt(
        "auto",
        "how the model marks its reasoning: qwen3, deepseek_r1, openai_gptoss, gemma4, two tags as in "
        "'<think>,</think>', the name of a parser of an installed package, none, or auto: as the chat template shows",
    )
    tool_strict_level: str = opt(
        "auto",
        "what answers hold to where a request has tools: auto: as it asks; function: the form of calls and the names; "
        "parameter: the schemas too, as if each tool were strict",
        choices=("auto", "function", "parameter"),
    )
    exclude_tools_when_tool_choice_none: bool = opt(False, "the template does not see tools that may not be called")
    disable_any_whitespace: bool = opt(
        False, "JSON of structured outputs has no blanks", aliases=("guided_decoding_disable_any_whitespace",)
    )
    disable_additional_properties: bool = opt(
        False,
        "objects of a schema have no properties but those it lists",
        aliases=("guided_decoding_disable_additional_properties",),
    )
    response_role: str = opt("assistant", "role of the answer")
    fingerprint_mode: str = opt(
        "full",
        "system_fingerprint; full: version, ranks and a digest; hash: version and digest; custom: --fingerprint-value; "
        "none: null",
        choices=("full", "hash", "custom", "none"),
    )
    fingerprint_value: str = opt("", "system_fingerprint of --fingerprint-mode custom")
    skip_model_name_validation: bool = opt(
        False, "requests may name any model", env=("VLLM_SKIP_MODEL_NAME_VALIDATION",)
    )
    allowed_hosts: list[str] = opt(
        [],
        "Host headers that requests may have: names, .suffix, addresses; *: any (default: the loopback names where the "
        "server listens on a loopback address, else any)",
    )
    allowed_origins: list[str] = opt([], "origins whose pages may send requests, and read answers (CORS); *: any")
    allowed_methods: list[str] = opt(["*"], "CORS methods")
    allowed_headers: list[str] = opt(["*"], "CORS headers")
    allow_credentials: bool = opt(False, "CORS credentials", aliases=("allowed_credentials",))
    root_path: str = opt("", "path prefix of a proxy, which may strip it or keep it")
    ssl_keyfile: str = opt("", "TLS key")
    ssl_certfile: str = opt("", "TLS certificate")
    ssl_ca_certs: str = opt("", "certificates that sign those of clients")
    ssl_cert_reqs: int = opt(0, "client certificates; 0: none, 1: optional, 2: required", bound=Bound(0, 2))
    ssl_ciphers: str = opt("", "OpenSSL cipher list")
    enable_ssl_refresh: bool = opt(
        False, "read certificates and keys again when their files change (SIGHUP does so in any case)"
    )
    forwarded_allow_ips: list[str] = opt(
        ["127.0.0.1", "::1"],
        "addresses and networks of proxies whose X-Forwarded-For and X-Forwarded-Proto count; *: every peer's",
        env=("FORWARDED_ALLOW_IPS",),
    )
    allowed_media_domains: list[str] = opt([], "hosts that media may be fetched from (default: every public one)")
    allowed_local_media_path: str = opt("", "folder that file:// media may be read from")
    max_image_pixels: int | None = opt(
        None,
        "most pixels of an image, checked before it is decoded",
        kind="count",
        env=("VLLM_MAX_IMAGE_PIXELS",),
        bound=COUNT,
    )
    image_fetch_timeout: float | None = opt(
        None,
        "seconds that fetching an image may take",
        env=("VLLM_IMAGE_FETCH_TIMEOUT",),
        bound=SOME_SECONDS,
    )
    max_media_bytes: int = opt(
        50_000_000, "largest file of an image or video, fetched, read or sent", kind="bytes", bound=BYTES,
        env=("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB",),
    )  # fmt: skip
    media_redirects: bool = opt(
        True, "follow redirects to media; each address is checked", env=("VLLM_MEDIA_URL_ALLOW_REDIRECTS",)
    )
    video_fetch_timeout: float | None = opt(
        None,
        "seconds that fetching a video may take",
        env=("VLLM_VIDEO_FETCH_TIMEOUT",),
        bound=SOME_SECONDS,
    )
    max_video_frames: int = opt(MAX_CLIP_FRAMES, "most frames taken from a video", kind="count", bound=COUNT)
    max_video_seconds: float = opt(MAX_CLIP_SECONDS, "seconds that a video may be long", bound=SOME_SECONDS)
    max_num_queued_reqs: int | None = opt(None, "requests in the queue before a 429", kind="count", bound=NOT_NEGATIVE)
    max_num_queued_tokens: int | None = opt(None, "prompt tokens in the queue before a 429", kind="count", bound=COUNT)
    max_num_queued_pixels: int | None = opt(None, "pixels in the queue before a 429", kind="count", bound=BYTES)
    lora_modules: list[str] = opt(
        [], "adapters to serve: NAME=PATH (a folder or hub id), or JSON with name, path and base_model_name"
    )
    default_mm_loras: JsonObject = opt(
        {}, 'JSON: adapters of requests to the base model with media of one kind: {"image": "PATH"}', kind="json"
    )
    allow_runtime_lora_updating: bool = opt(
        False, "routes /v1/load_lora_adapter and /v1/unload_lora_adapter", env=("VLLM_ALLOW_RUNTIME_LORA_UPDATING",)
    )
    allowed_lora_path: str = opt("", "folder that adapters loaded at run time may be in; hub ids may be loaded too")
    max_body_bytes: int = opt(64 << 20, "largest request body", kind="bytes", bound=BYTES)
    max_answer_bytes: int = opt(
        64 << 20,
        "largest answer of one request, estimated before it runs",
        kind="bytes",
        bound=Bound(64 << 10, MOST_BYTES),
    )
    max_queued_body_bytes: int = opt(
        1 << 30,
        "bytes of request bodies in memory before a 429",
        kind="bytes",
        bound=BYTES,
    )
    shutdown_timeout: float = opt(30.0, "seconds that running requests get after SIGTERM", bound=SECONDS)
    drain_delay: float = opt(
        0.0,
        "seconds after SIGTERM for which the server still takes requests, while /health and /ready say 503",
        bound=SECONDS,
    )
    enable_sleep_mode: bool = opt(False, "routes /sleep, /wake_up and /is_sleeping: a sleeping engine holds no memory")
    sleep_after: float = opt(
        0.0, "seconds without a request after which the engine falls asleep; the next request wakes it; 0: never",
        bound=SECONDS,
    )  # fmt: skip
    max_engine_restarts: int = opt(
        5, "restarts of the engine without a steady minute between them before /live says 503", bound=NOT_NEGATIVE
    )
    compile_timeout: float = opt(
        1800.0, "seconds that the engine may take to load or compile", env=("VLLM_ENGINE_READY_TIMEOUT_S",),
        bound=SOME_SECONDS,
    )  # fmt: skip
    timeout_keep_alive: int = opt(
        5, "seconds that an idle connection is kept", env=("VLLM_HTTP_TIMEOUT_KEEP_ALIVE",), bound=SECONDS
    )
    h11_max_incomplete_event_size: int = opt(64 << 10, "largest request head", kind="bytes", bound=Bound(1024, 2**30))
    h11_max_header_count: int = opt(256, "most header fields of a request before a 431", bound=Bound(1, 65536))
    request_timeout: float = opt(
        0.0,
        "seconds that a request may take, its wait included, before a 504; the header x-request-timeout asks for less; "
        "0: no limit",
        bound=SECONDS,
    )
    receive_timeout: float = opt(
        20.0,
        "seconds in which a request's head must arrive, and 1 KiB of its body for each of them; 0: no limit",
        bound=SECONDS,
    )
    max_connections: int | None = opt(
        None,
        "open connections; the server turns further ones away (default: 4096, fewer where descriptors are few)",
        kind="count",
        bound=COUNT,
    )
    sse_keep_alive_interval: float = opt(0.0, "seconds between comments on a silent stream; 0: none", bound=SECONDS)
    stream_interval: int = opt(
        1, "tokens in an event of a stream; its first token comes at once, the last event may have fewer", bound=COUNT
    )
    enable_prompt_tokens_details: bool = opt(
        True, "usage has prompt_tokens_details: tokens from the cache, of images and of videos"
    )
    enable_force_include_usage: bool = opt(False, "report usage in every event of every stream")
    strict_request_fields: bool = opt(
        False, "refuse JSON fields that have no effect instead of naming them in the header x-ignored-fields"
    )
    return_tokens_as_token_ids: bool = opt(False, "logprobs show tokens as token_id:ID unless a request says otherwise")
    metrics_auth: bool = opt(False, "/metrics needs the API key too (with --api-key-file it does so in any case)")
    metrics_open: bool = opt(False, "/metrics needs no key with --api-key-file either, though it names tenants")
    enable_tokenizer_info_endpoint: bool = opt(False, "/tokenizer_info shows tokenizer_config.json")
    server_dev_mode: bool = opt(
        False, "routes for development: /reset_prefix_cache, /server_info and the like",
        env=("VLLM_SERVER_DEV_MODE",),
    )  # fmt: skip
    disable_page: bool = opt(False, "no web page at /")
    disable_fastapi_docs: bool = opt(False, "no /docs, /redoc and /openapi.json")
    disable_log_stats: bool = opt(False, "no line about throughput")
    log_stats_interval: float = opt(
        10.0, "seconds between two lines about throughput", env=("VLLM_LOG_STATS_INTERVAL",), bound=SOME_SECONDS
    )
    enable_log_requests: bool = opt(False, "one line for each request that comes in, without its contents")
    enable_log_outputs: bool = opt(False, "prompts and answers in the log, as text")
    max_log_len: int | None = opt(
        None, "characters of a prompt or an answer in a log line (default: all)", bound=NOT_NEGATIVE
    )
    otlp_traces_endpoint: str = opt(
        "", "URL of an OTLP/HTTP collector that gets a trace of each request (needs trencadis[otel])"
    )
    show_hidden_metrics: bool = opt(False, "/metrics has the names that vLLM has given up, too")
    show_hidden_metrics_for_version: str = opt(
        "", "vLLM's form of --show-hidden-metrics: any version shows all of them"
    )
    uvicorn_log_level: str = opt(
        "info",
        "smallest level that the HTTP server logs",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )
    disable_uvicorn_access_log: bool = opt(False, "write no access log")
    disable_access_log_for_endpoints: list[str] = opt([], "paths that the access log leaves out", kind="commas")

    app: str = opt("trencadis.server.processes.build_app:build_app", "factory of the HTTP app, for tests", hidden=True)
