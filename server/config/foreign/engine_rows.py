"""Flags about the model, its files, its memory, its scheduler and how it is computed."""

from __future__ import annotations

from trencadis.server.config.foreign.meanings import (
    at_most,
    attention,
    eager_at,
    frames,
    overlap,
    switch,
    without_media,
)
from trencadis.server.config.foreign.row import FlagRow, free, means, refused

_KERNELS = "the device chooses its kernels; answers are the same"
_GRAPHS = "graphs follow the plan of shapes (--graph-memory, VLLM_DECODE_BS_BUCKET_MAX and the like)"
_READS = "safetensors are mapped into memory; how they are read changes no answer"
_SCALES = "attention of images computes in the type of the model (--dtype)"
_SHAPE = "all layers attend to all tokens before them, and KV blocks have one form"
_OTHER_CODE = "no code of others runs in a server; an installed package offers a device by the entry point "
_HOST_WEIGHTS = "--cpu-offload-gb puts the last layers into host memory, and copies each ahead of its turn"
_ROPE = "put it into config.json of the checkpoint (rope_scaling, rope_theta)"

MODEL: tuple[FlagRow, ...] = (
    refused("hf_config_path", "str", "config.json is the checkpoint's; put the other one into its folder"),
    free("code_revision", "str", "no code of a repository ever runs"),
    refused("config_format", "str", "checkpoints have a config.json in the hub's form", "auto", "hf"),
    refused("model_impl", "str", "models are the server's own", "auto", "vllm"),
    refused("model_class_overrides", "json", "models are the server's own"),
    refused("tokenizer_mode", "str", "tokenizers are read from tokenizer.json", "auto", "hf"),
    refused("skip_tokenizer_init", "bool", "prompts of token ids work with the tokenizer there too"),
    refused("tokens_only", "bool", "completions take and return token ids (prompt, return_token_ids)"),
    free("tokenizer_pool_size", "int", "the tokenizer is fast and runs in threads", 0),
    free("tokenizer_pool_type", "str", "the tokenizer is fast and runs in threads", "ray"),
    free("tokenizer_pool_extra_config", "json", "the tokenizer is fast and runs in threads"),
    refused("rope_scaling", "json", _ROPE),
    refused("rope_theta", "float", _ROPE),
    free("engram_config", "json", "no model that is served has n-gram embeddings"),
    refused("diffusion_config", "json", "models that are served draw one token after the other"),
    means("language_model_only", "bool", '`--limit-mm-per-prompt \'{"image": 0, "video": 0}\'`', without_media),
    refused("mm_encoder_only", "bool", "a server has the whole model"),
    refused("enable_prompt_embeds", "bool", "prompts are texts or token ids"),
    refused("enable_mm_embeds", "bool", "images and videos come as files, URLs or data"),
    free("disable_sliding_window", "bool", _SHAPE),
    free("disable_cascade_attn", "bool", _KERNELS, True),
    refused("worker_cls", "str", _OTHER_CODE + "trencadis.backends", "auto"),
    refused("worker_extension_cls", "str", _OTHER_CODE + "trencadis.backends"),
    refused("additional_config", "json", "flags and variables say all about a device (docs: environment)"),
    refused("override_neuron_config", "json", "devices are cpu, cuda, hpu and those of installed packages"),
    refused("backend_option", "json", "flags and variables say all about a device (docs: environment)"),
    refused("logits_processors", "list", "logit_bias, allowed_token_ids, bad_words and structured outputs of a request "
            "decide what may be drawn"),
    refused("logits_processor_pattern", "str", "logit_bias, allowed_token_ids and bad_words of a request serve"),
    refused("io_processor_plugin", "str", "no code of others runs in a server"),
    refused("aux_output_config", "json", "answers hold tokens, log-probabilities and text"),
    refused("enable_trace_replay", "bool", "echo with logprobs gives the log-probabilities of given tokens"),
    refused("watermark_config", "json", "answers are not marked"),
    refused("weight_transfer_config", "json", "weights are read once, at the start; restart for others"),
)  # fmt: skip

LOADING: tuple[FlagRow, ...] = (
    free("safetensors_load_strategy", "str", _READS),
    free("safetensors_prefetch_num_threads", "int", _READS),
    free("safetensors_prefetch_block_size", "int", _READS),
    free("pt_load_map_location", "str", "weights are mapped on the host, which no map changes", "cpu"),
    free("use_tqdm_on_load", "bool", "the log tells how far loading is", True),
    free("ignore_patterns", "list", "only configuration, tokenizer, templates and one copy of the weights are fetched",
         "original/**/*"),
    refused("model_loader_extra_config", "json", "--load-format says how weights are made",
            keys=tuple(free(key, "json", _READS) for key in (
                "enable_multithread_load", "num_threads", "concurrency", "memory_limit", "distributed"))),
    refused("quantization_config", "json", "the checkpoint says how its weights are quantised; --quantization makes "
            "fp8, int8 or int4 of 16-bit weights"),
    free("allow_deprecated_quantization", "bool", "--quantization lists what is read; none of it is deprecated"),
    refused("quantization_param_path", "str", "scales are read from the checkpoint"),
)  # fmt: skip

MEMORY: tuple[FlagRow, ...] = (
    free("swap_space", "float", "what is preempted is computed again, which gives the same answer", 0),
    free("preemption_mode", "str", "what is preempted is computed again, which gives the same answer", "recompute"),
    refused("cpu_offload_params", "list", _HOST_WEIGHTS),
    refused("offload_backend", "str", _HOST_WEIGHTS, "auto"),
    refused("offload_group_size", "int", _HOST_WEIGHTS, 0),
    refused("offload_num_in_group", "int", _HOST_WEIGHTS, 1),
    refused("offload_prefetch_step", "int", _HOST_WEIGHTS, 1),
    refused("offload_params", "list", _HOST_WEIGHTS),
    refused("kv_offloading_backend", "str", "--kv-offloading-size keeps blocks in this machine's memory", "native"),
    refused("kv_transfer_config", "json", "KV blocks are not sent to other servers"),
    refused("kv_events_config", "json", "events of KV blocks are not published; /metrics counts hits"),
    refused("ec_transfer_config", "json", "encoded images are not sent to other servers"),
    refused("ec_manager_config", "json", "--encoder-cache-images sizes the encoder cache"),
    free("calculate_kv_scales", "bool", "8-bit K and V have scales of each token and head, found as they run"),
    refused("kv_cache_dtype_skip_layers", "list", "all layers keep K and V in the type of --kv-cache-dtype"),
    free("disable_hybrid_kv_cache_manager", "bool", _SHAPE),
    free("kv_sharing_fast_prefill", "bool", "no model that is served shares K and V between layers"),
    free("swa_bounded_replay", "bool", _SHAPE, True),
    free("prefix_cache_retention_interval", "int", _SHAPE, 0),
    refused("prefix_match_unit", "int", "prefixes are shared by whole KV blocks (--block-size)"),
    free("prefix_caching_hash_algo", "str", "keys of prefixes are keyed digests of 16 bytes or more", "sha256"),
    refused("enable_cumem_allocator", "bool", "the device's own allocator serves"),
    refused("enable_nccl_comm_suspend", "bool", "ranks keep what they need to sum"),
    refused("sleep_mode_offload_cudagraph", "bool", "--enable-sleep-mode: a sleeping engine keeps nothing"),
    refused("sleep_preserve_parameter_names", "list", "--enable-sleep-mode: a sleeping engine keeps nothing"),
    free("skip_mm_profiling", "bool", "no image is encoded to find out what images need; the ledger says it"),
)  # fmt: skip

SCHEDULER: tuple[FlagRow, ...] = (
    means("async_scheduling", "bool", "`--async-depth 1` (`--no-async-scheduling`: 0)", overlap),
    means("max_num_active_seqs", "int", "`--max-num-seqs`, if it is smaller", at_most("max_num_seqs")),
    means("max_num_scheduled_tokens", "int", "`--max-num-batched-tokens`, if it is smaller",
          at_most("max_num_batched_tokens")),
    refused("scheduler_cls", "str", "--scheduling-policy is fcfs, priority or fair",
            "vllm.v1.core.sched.scheduler.scheduler", "vllm.core.scheduler.scheduler"),
    free("scheduler_reserve_full_isl", "bool", "a request starts only if its KV blocks fit; running ones always end",
         True),
    refused("long_prefill_token_threshold", "int", "decoding rows come first, and prompts share what is left of "
            "--max-num-batched-tokens", 0),
    refused("long_prefill_token_threshold_adaptive", "bool", "prompts share what is left of --max-num-batched-tokens"),
    refused("max_num_partial_prefills", "int", "prompts share what is left of --max-num-batched-tokens", 1),
    refused("max_long_partial_prefills", "int", "prompts share what is left of --max-num-batched-tokens", 1),
    free("watermark", "float", "a request starts only if its KV blocks fit; what is preempted gives the same answer",
         0),
    free("disable_chunked_mm_input", "bool", "an image is encoded whole before a text needs it"),
    free("num_scheduler_steps", "int", "--async-depth says how far steps overlap", 1),
    free("multi_step_stream_outputs", "bool", "each token is sent when it is there"),
    free("scheduler_delay_factor", "float", "a prompt starts when there is room for it", 0),
    free("delay_factor", "float", "a prompt starts when there is room for it", 0),
    free("use_v2_block_manager", "bool", "there is one block manager"),
    free("disable_async_output_proc", "bool", "--async-depth says how far steps overlap"),
)  # fmt: skip

COMPUTING: tuple[FlagRow, ...] = (
    FlagRow("compilation_config", "no effect", "json", _GRAPHS, keys=(
        means("cudagraph_mode", "str", "NONE: `--enforce-eager`", eager_at("NONE", 0)),
        means("use_cudagraph", "str", "false: `--enforce-eager`", eager_at("FALSE")),
    )),
    means("optimization_level", "str", "0: `--enforce-eager`; others tune how graphs are made", eager_at("0", "O0"),
          "1", "2", "3", "o1", "o2", "o3"),
    free("performance_mode", "str", _GRAPHS, "balanced"),
    free("cudagraph_capture_sizes", "list", _GRAPHS),
    free("max_cudagraph_capture_size", "int", _GRAPHS),
    free("max_seq_len_to_capture", "int", _GRAPHS),
    free("max_model_len_to_capture", "int", _GRAPHS),
    FlagRow("attention_config", "no effect", "json", _KERNELS, keys=(
        means("backend", "str", "`--attention-backend`", attention, "auto"),
    )),
    free("linear_backend", "str", _KERNELS, "auto"),
    free("kernel_config", "json", _KERNELS),
    free("ir_op_priority", "json", _KERNELS),
    free("sparse_indexer_topk_backend", "str", _KERNELS, "auto"),
    free("enable_flashinfer_autotune", "bool", _KERNELS),
    free("mm_encoder_attn_backend", "str", _KERNELS),
    free("enable_flash_late_interaction", "bool", "no model that is served scores by late interaction", True),
    refused("mm_encoder_attn_dtype", "str", _SCALES),
    refused("mm_encoder_fp8_scale_path", "str", _SCALES),
    refused("mm_encoder_fp8_scale_save_path", "str", _SCALES),
    refused("mm_encoder_fp8_scale_save_margin", "float", _SCALES, 1.5),
    refused("jit_monitor_mode", "str", "launches without a graph are counted by bucket and reason "
            "(/buckets, vllm:graph_bucket_misses_total)", "warn", "auto"),
    refused("jit_monitor_verbose", "bool", "launches without a graph are counted by bucket and reason (/buckets)"),
)  # fmt: skip

MEDIA: tuple[FlagRow, ...] = (
    means("disable_mm_preprocessor_cache", "bool", "`--mm-processor-cache-gb 0`", switch("mm_processor_cache_gb", 0.0)),
    means("media_io_kwargs", "json", "`--mm-processor-kwargs` (videos_kwargs: num_frames, fps)", frames),
    free("mm_processor_cache_type", "str", "the API process keeps decoded images; where changes no answer", "lru"),
    free("mm_hasher_algorithm", "str", "content is known by a digest of 32 bytes", "blake3"),
    free("mm_shm_cache_max_object_size_mb", "int", "the API process keeps decoded images", 128),
    free("mm_tensor_ipc", "str", "how pixels reach the engine changes no answer", "direct_rpc"),
    free("mm_device_do_normalize", "bool", "the device normalises pixels; answers are the same", True),
    refused("mm_processor_device", "str", "images are decoded and resized on the CPU", "auto", "cpu"),
    refused("mm_ipc_gpu_memory_gb", "float", "images and videos are decoded on the CPU", 0),
    free("renderer_num_workers", "int", "decoding has one process a CPU, at most 8", 1),
    refused("interleave_mm_strings", "bool", "--chat-template-content-format openai puts images where they stand in a "
            "message"),
    refused("video_pruning_rate", "float", "all tokens of a video are used; fps and max_pixels of "
            "--mm-processor-kwargs make fewer", 0),
    refused("video_pruning_method", "str", "all tokens of a video are used", "evs"),
)  # fmt: skip

ROWS = (*MODEL, *LOADING, *MEMORY, *SCHEDULER, *COMPUTING, *MEDIA)
