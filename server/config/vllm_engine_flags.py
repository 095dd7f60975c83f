"""Flags about the model, its files, memory, scheduler and computation."""

from __future__ import annotations

from trencadis.server.config.vllm_flag_row_and_value_conversion import (
    FlagRow,
    convert_async_scheduling,
    convert_attention_backend,
    convert_video_frames,
    disable_graphs_at,
    forbid_media,
    make_absent_row,
    make_free_row,
    make_means_row,
    make_refused_row,
    set_when_on,
    take_smaller,
)

_KERNELS = "the device chooses its kernels; answers are the same"
_GRAPHS = "graphs follow the plan of shapes (--graph-memory, VLLM_DECODE_BS_BUCKET_MAX and the like)"
_READS = "safetensors are mapped into memory; how they are read changes no answer"
_SCALES = "attention of images computes in the type of the model (--dtype)"
_SHAPE = "a KV block holds a token's keys of all layers, with windows or without, for as long as its request runs"
_OTHER_CODE = "no code of others runs in a server; an installed package offers a device by the entry point "
_HOST_WEIGHTS = "--cpu-offload-gb puts the last layers into host memory, and prefetches each before it runs"
_ROPE = "put it into config.json of the checkpoint (rope_scaling, rope_theta)"

MODEL: tuple[FlagRow, ...] = (
    make_refused_row("hf_config_path", "str", "config.json is the checkpoint's; put the other one into its folder"),
    make_free_row("code_revision", "str", "no code of a repository ever runs"),
    make_refused_row("config_format", "str", "checkpoints have a config.json in the hub's form", "auto", "hf"),
    make_refused_row("model_impl", "str", "models are the server's own", "auto", "vllm"),
    make_refused_row("model_class_overrides", "json", "models are the server's own"),
    make_refused_row("tokenizer_mode", "str", "tokenizers are read from tokenizer.json", "auto", "hf"),
    make_refused_row("skip_tokenizer_init", "bool", "prompts of token ids work with the tokenizer there too"),
    make_refused_row("tokens_only", "bool", "completions take and return token ids (prompt, return_token_ids)"),
    make_free_row("tokenizer_pool_size", "int", "the tokenizer is fast and runs in threads", 0),
    make_free_row("tokenizer_pool_type", "str", "the tokenizer is fast and runs in threads"),
    make_free_row("tokenizer_pool_extra_config", "json", "the tokenizer is fast and runs in threads"),
    make_refused_row("rope_scaling", "json", _ROPE),
    make_refused_row("rope_theta", "float", _ROPE),
    make_absent_row("engram_config", "json", "n-gram embeddings"),
    make_refused_row("diffusion_config", "json", "models that are served draw one token after the other"),
    make_means_row("language_model_only", "bool", '`--limit-mm-per-prompt \'{"image": 0, "video": 0}\'`', forbid_media),
    make_refused_row("mm_encoder_only", "bool", "a server has the whole model"),
    make_refused_row("enable_prompt_embeds", "bool", "prompts are texts or token ids"),
    make_refused_row("enable_mm_embeds", "bool", "images and videos come as files, URLs or data"),
    make_free_row("disable_cascade_attn", "bool", _KERNELS, True),
    make_refused_row("worker_cls", "str", _OTHER_CODE + "trencadis.backends", "auto"),
    make_refused_row("worker_extension_cls", "str", _OTHER_CODE + "trencadis.backends"),
    make_refused_row("additional_config", "json", "flags and variables say all about a device (docs: environment)"),
    make_refused_row("override_neuron_config", "json", "devices are cpu, cuda, hpu and those of installed packages"),
    make_refused_row("backend_option", "json", "flags and variables say all about a device (docs: environment)"),
    make_refused_row("logits_processors", "list", "logit_bias, allowed_token_ids, bad_words and structured outputs of "
        "a request "
            "decide what may be drawn"),
    make_refused_row("logits_processor_pattern", "str",
        "logit_bias, allowed_token_ids and bad_words of a request serve"),
    make_refused_row("io_processor_plugin", "str", "no code of others runs in a server"),
    make_refused_row("aux_output_config", "json", "answers hold tokens, log-probabilities and text"),
    make_refused_row("enable_trace_replay", "bool", "echo with logprobs gives the log-probabilities of given tokens"),
    make_refused_row("watermark_config", "json", "answers are not marked"),
    make_refused_row("weight_transfer_config", "json", "weights are read once, at the start; restart for others"),
)  # fmt: skip

LOADING: tuple[FlagRow, ...] = (
    make_free_row("safetensors_load_strategy", "str", _READS),
    make_free_row("safetensors_prefetch_num_threads", "int", _READS),
    make_free_row("safetensors_prefetch_block_size", "int", _READS),
    make_free_row("pt_load_map_location", "str", "weights are mapped on the host, which no map changes", "cpu"),
    make_free_row("use_tqdm_on_load", "bool", "the log tells how far loading is", True),
    make_free_row("ignore_patterns", "list", "only configuration, tokenizer, templates and one copy of the weights are "
        "fetched",
         "original/**/*"),
    make_refused_row("model_loader_extra_config", "json", "--load-format says how weights are made",
            keys=tuple(make_free_row(key, "json", _READS) for key in (
                "enable_multithread_load", "num_threads", "concurrency", "memory_limit", "distributed"))),
    make_refused_row("quantization_config", "json", "the checkpoint says how its weights are quantised; --quantization "
        "makes "
            "fp8, int8 or int4 of 16-bit weights"),
    make_free_row("allow_deprecated_quantization", "bool",
        "--quantization lists what is read; none of it is deprecated"),
    make_refused_row("quantization_param_path", "str", "scales are read from the checkpoint"),
)  # fmt: skip

MEMORY: tuple[FlagRow, ...] = (
    make_free_row("swap_space", "float", "what is preempted is computed again, which gives the same answer", 0),
    make_free_row("preemption_mode", "str", "what is preempted is computed again, which gives the same answer",
        "recompute"),
    make_refused_row("cpu_offload_params", "list", _HOST_WEIGHTS),
    make_refused_row("offload_backend", "str", _HOST_WEIGHTS, "auto"),
    make_refused_row("offload_group_size", "int", _HOST_WEIGHTS, 0),
    make_refused_row("offload_num_in_group", "int", _HOST_WEIGHTS, 1),
    make_refused_row("offload_prefetch_step", "int", _HOST_WEIGHTS, 1),
    make_refused_row("offload_params", "list", _HOST_WEIGHTS),
    make_refused_row("kv_offloading_backend", "str", "--kv-offloading-size keeps blocks in this machine's memory",
        "native"),
    make_refused_row("kv_transfer_config", "json", "KV blocks are not sent to other servers"),
    make_refused_row("kv_events_config", "json", "events of KV blocks are not published; /metrics counts hits"),
    make_refused_row("ec_transfer_config", "json", "encoded images are not sent to other servers"),
    make_refused_row("ec_manager_config", "json", "--encoder-cache-images sizes the encoder cache"),
    make_free_row("calculate_kv_scales", "bool", "8-bit K and V have scales of each token and head, found as they run"),
    make_refused_row("kv_cache_dtype_skip_layers", "list", "all layers keep K and V in the type of --kv-cache-dtype"),
    make_free_row("disable_hybrid_kv_cache_manager", "bool", _SHAPE),
    make_free_row("kv_sharing_fast_prefill", "bool", "layers with shared keys compute all tokens of a prompt"),
    make_free_row("swa_bounded_replay", "bool", _SHAPE, True),
    make_free_row("prefix_cache_retention_interval", "int", _SHAPE, 0),
    make_refused_row("prefix_match_unit", "int", "prefixes are shared by whole KV blocks (--block-size)"),
    make_free_row("prefix_caching_hash_algo", "str", "keys of prefixes are keyed digests of 16 bytes or more",
        "sha256"),
    make_refused_row("enable_cumem_allocator", "bool", "the device's own allocator serves"),
    make_refused_row("enable_nccl_comm_suspend", "bool", "ranks keep what they need to sum"),
    make_refused_row("sleep_mode_offload_cudagraph", "bool", "--enable-sleep-mode: a sleeping engine keeps nothing"),
    make_free_row("sleep_mode_backend", "str", "--enable-sleep-mode ends the process, which frees its memory", "cumem"),
    make_refused_row("sleep_preserve_parameter_names", "list", "--enable-sleep-mode: a sleeping engine keeps nothing"),
    make_free_row("skip_mm_profiling", "bool", "no image is encoded to find out what images need; the ledger says it"),
)  # fmt: skip

SCHEDULER: tuple[FlagRow, ...] = (
    make_means_row("async_scheduling", "bool", "`--async-depth 1` (`--no-async-scheduling`: 0)",
        convert_async_scheduling),
    make_means_row("max_num_active_seqs", "int", "`--max-num-seqs`, if it is smaller", take_smaller("max_num_seqs")),
    make_means_row("max_num_scheduled_tokens", "int", "`--max-num-batched-tokens`, if it is smaller",
          take_smaller("max_num_batched_tokens")),
    make_refused_row("scheduler_cls", "str", "--scheduling-policy is fcfs, priority or fair",
            "vllm.v1.core.sched.scheduler.scheduler", "vllm.core.scheduler.scheduler"),
    make_free_row("scheduler_reserve_full_isl", "bool", "a request starts only if its KV blocks fit; running ones "
        "always end",
         True),
    make_refused_row("long_prefill_token_threshold", "int", "decoding rows come first, and prompts share what is left "
        "of "
            "--max-num-batched-tokens", 0),
    make_refused_row("long_prefill_token_threshold_adaptive", "bool", "prompts share what is left of "
        "--max-num-batched-tokens"),
    make_refused_row("max_num_partial_prefills", "int", "prompts share what is left of --max-num-batched-tokens", 1),
    make_refused_row("max_long_partial_prefills", "int", "prompts share what is left of --max-num-batched-tokens", 1),
    make_free_row("watermark", "float", "a request starts only if its KV blocks fit; what is preempted gives the same "
        "answer",
         0),
    make_free_row("disable_chunked_mm_input", "bool", "an image is encoded whole before a text needs it"),
    make_free_row("num_scheduler_steps", "int", "--async-depth says how far steps overlap", 1),
    make_free_row("multi_step_stream_outputs", "bool", "each token is sent when it is there"),
    make_free_row("scheduler_delay_factor", "float", "a prompt starts when there is room for it", 0),
    make_free_row("delay_factor", "float", "a prompt starts when there is room for it", 0),
    make_free_row("use_v2_block_manager", "bool", "there is one block manager"),
    make_free_row("disable_async_output_proc", "bool", "--async-depth says how far steps overlap"),
)  # fmt: skip

COMPUTING: tuple[FlagRow, ...] = (
    FlagRow("compilation_config", "no effect", "json", _GRAPHS, keys=(
        make_means_row("cudagraph_mode", "str", "NONE: `--enforce-eager`", disable_graphs_at("NONE", 0)),
        make_means_row("use_cudagraph", "str", "false: `--enforce-eager`", disable_graphs_at("FALSE")),
    )),
    make_means_row("optimization_level", "str", "0: `--enforce-eager`; others tune how graphs are made",
        disable_graphs_at("0", "O0"),
          "1", "2", "3", "o1", "o2", "o3"),
    make_free_row("performance_mode", "str", _GRAPHS, "balanced"),
    make_free_row("cudagraph_capture_sizes", "list", _GRAPHS),
    make_free_row("max_cudagraph_capture_size", "int", _GRAPHS),
    make_free_row("max_seq_len_to_capture", "int", _GRAPHS),
    make_free_row("max_model_len_to_capture", "int", _GRAPHS),
    FlagRow("attention_config", "no effect", "json", _KERNELS, keys=(
        make_means_row("backend", "str", "`--attention-backend`", convert_attention_backend, "auto"),
    )),
    make_free_row("linear_backend", "str", _KERNELS, "auto"),
    make_free_row("kernel_config", "json", _KERNELS),
    make_free_row("monokernel", "bool", _KERNELS),
    make_free_row("ir_op_priority", "json", _KERNELS),
    make_free_row("sparse_indexer_topk_backend", "str", _KERNELS, "auto"),
    make_free_row("enable_flashinfer_autotune", "bool", _KERNELS),
    make_free_row("mm_encoder_attn_backend", "str", _KERNELS),
    make_absent_row("enable_flash_late_interaction", "bool", "late interaction", True),
    make_refused_row("mm_encoder_attn_dtype", "str", _SCALES),
    make_refused_row("mm_encoder_fp8_scale_path", "str", _SCALES),
    make_refused_row("mm_encoder_fp8_scale_save_path", "str", _SCALES),
    make_refused_row("mm_encoder_fp8_scale_save_margin", "float", _SCALES, 1.5),
    make_refused_row("jit_monitor_mode", "str", "launches without a graph are counted by bucket and reason "
            "(/buckets, vllm:graph_bucket_misses_total)", "warn", "auto"),
    make_refused_row("jit_monitor_verbose", "bool", "launches without a graph are counted by bucket and reason "
        "(/buckets)"),
)  # fmt: skip

MEDIA: tuple[FlagRow, ...] = (
    make_means_row("disable_mm_preprocessor_cache", "bool", "`--mm-processor-cache-gb 0`",
        set_when_on("mm_processor_cache_gb", 0.0)),
    make_means_row("media_io_kwargs", "json", "`--mm-processor-kwargs` (videos_kwargs: num_frames, fps)",
        convert_video_frames),
    make_free_row("mm_processor_cache_type", "str", "the API process keeps decoded images; where changes no answer",
        "lru"),
    make_free_row("mm_hasher_algorithm", "str", "content is known by a digest of 32 bytes", "blake3"),
    make_free_row("mm_shm_cache_max_object_size_mb", "int", "the API process keeps decoded images", 128),
    make_free_row("mm_tensor_ipc", "str", "how pixels reach the engine changes no answer", "direct_rpc"),
    make_free_row("mm_device_do_normalize", "bool", "the device normalises pixels; answers are the same", True),
    make_refused_row("mm_processor_device", "str", "images are decoded and resized on the CPU", "auto", "cpu"),
    make_refused_row("mm_ipc_gpu_memory_gb", "float", "images and videos are decoded on the CPU", 0),
    make_free_row("renderer_num_workers", "int", "decoding has one process a CPU, at most 8", 1),
    make_refused_row("interleave_mm_strings", "bool", "--chat-template-content-format openai puts images where they "
        "stand in a "
            "message"),
    make_refused_row("video_pruning_rate", "float", "all tokens of a video are used; fps and max_pixels of "
            "--mm-processor-kwargs make fewer", 0),
    make_refused_row("video_pruning_method", "str", "all tokens of a video are used", "evs"),
)  # fmt: skip

ROWS = (*MODEL, *LOADING, *MEMORY, *SCHEDULER, *COMPUTING, *MEDIA)
