"""Engine configuration: frozen values from which the flags, the YAML reader and the start-up dump are generated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trencadis.core.flag_declaration import BYTES, COUNT, SECONDS, SHARE, SOME_SECONDS, Bound, opt, options
from trencadis.core.json_types import JsonObject
from trencadis.core.kv_cache_format import NAMES
from trencadis.core.request import MAX_LOGPROBS

KV_DTYPES = ("nvfp4", "bfloat16", "float16")
"""Values of vLLM's ``--kv-cache-dtype`` that are not supported here."""

LOADERS = (
    "npcache", "tensorizer", "sharded_state", "gguf", "bitsandbytes", "mistral", "runai_streamer_sharded",
)  # fmt: skip
"""Values of vLLM's ``--load-format`` that are not supported here."""

WEIGHTS = ("bitsandbytes", "gguf", "modelopt", "modelopt_fp4", "mxfp4", "torchao", "quark", "aqlm", "hqq")
"""Values of vLLM's ``--quantization`` that are not supported here."""

ATTENTION = ("AUTO", "NONE", "NULL")
"""Values of vLLM's ``--attention-backend`` that leave the choice to the engine."""

OWN_ATTENTION = "TRITON_ATTN"
"""The device's own attention, whatever libraries are installed."""

OWN_ATTENTION_NAMES = (
    "TRITON", "CPU_ATTN", "HPU_ATTN", "HPU_ATTN_V1", "IPEX", "TORCH_SDPA",
    "XFORMERS", "FLEX_ATTENTION", "TREE_ATTN", "PALLAS", "NO_ATTENTION", "CUSTOM", "DUAL_CHUNK_FLASH_ATTN",
    "DIFFERENTIAL_FLASH_ATTN", "ROCM_FLASH", "ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN",
)  # fmt: skip
"""Other values of vLLM's ``--attention-backend``, each of which means OWN_ATTENTION here."""

ATTENTION_LIBRARIES = ("FLASH_ATTN", "FLASHINFER")

DRAFT_MODELS = (
    "eagle", "medusa", "mlp_speculator", "mtp", "deepseek_mtp", "qwen3_next_mtp", "dflash",
    "custom_class",
)  # fmt: skip
"""Methods of vLLM's speculation whose guesses come from a model, which are not supported here."""

OLDER_ATTENTION = "_VLLM_V1"
"""Suffix of such names in older versions of vLLM."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything the engine process needs, one field a flag (``max_model_len`` is ``--max-model-len``)."""

    model: str = opt("", "checkpoint folder or hub id; none: the bundled demo")
    tokenizer: str = opt("", "tokenizer folder or hub id (default: the model's)")
    revision: str = opt("", "branch, tag or commit of the hub repository")
    tokenizer_revision: str = opt("", "the same for the tokenizer")
    hf_token: str = opt(
        "", "hub token; without a value: the one that the hub's login keeps", secret=True, bare="",
        env=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    )  # fmt: skip
    download_dir: str = opt("", "folder for files of the hub (default: the hub's cache)")
    trust_remote_code: bool = opt(False, "no effect: no code of a repository ever runs")
    load_format: str = opt(
        "auto", "auto (safetensors, else pytorch_model.bin), safetensors, pt (pytorch_model.bin), dummy (random)",
        choices=("auto", "safetensors", "pt", "dummy"),
        means={**dict.fromkeys(("fastsafetensors", "runai_streamer", "instanttensor"), "safetensors"), "hf": "auto"},
        later=dict.fromkeys(LOADERS, "weights are read from safetensors or pytorch_model.bin; convert the checkpoint"),
    )  # fmt: skip
    packed_weights_dir: str = opt(
        "", "folder where packed weights are kept, so that later starts map them (cpu with AVX2)"
    )
    kernel_trial: bool = opt(
        True, "measure kernels at the first start, up to 0.5 s, and keep the fastest; off: the built-in choice (cpu)"
    )
    device: str = opt("auto", "auto, cpu, cuda or hpu")
    dtype: str = opt(
        "auto", "weights and activations",
        choices=("auto", "float32", "float", "bfloat16", "float16", "half"),
        means={"half": "float16", "float": "float32"},
    )  # fmt: skip
    quantization: str = opt(
        "", "8- or 4-bit weights: made of a 16-bit checkpoint (fp8, int8, int4, inc), or what the checkpoint must hold",
        choices=("", "fp8", "int8", "int4", "inc", "awq", "gptq", "compressed-tensors"),
        means={"awq_marlin": "awq", "gptq_marlin": "gptq", **dict.fromkeys(("none", "null", "auto", "false"), "")},
        later=dict.fromkeys(WEIGHTS, "such quantised weights are not read; awq, gptq and compressed-tensors are"),
        aliases=("q",),
    )  # fmt: skip
    seed: int = opt(0, "seed of requests that bring none; their arrival is mixed in", bound=Bound(-(2**63), 2**63 - 1))
    max_model_len: int | None = opt(
        None, "longest prompt plus answer in tokens (default: the model's)", kind="count", bound=COUNT, unset=("-1",)
    )
    disable_sliding_window: bool = opt(
        False, "no layer hides keys: a model whose layers see the last keys alone takes no longer texts than they see"
    )
    enforce_eager: bool = opt(False, "run every step without graphs")
    tensor_parallel_size: int = opt(1, "ranks that share one model", aliases=("tp",), bound=Bound(1, 1024))
    pipeline_parallel_size: int = opt(
        1, "stages that the layers are divided among, each of --tensor-parallel-size ranks", aliases=("pp",),
        bound=Bound(1, 1024),
    )  # fmt: skip
    pipeline_layer_partition: str = opt(
        "", "layers of each stage, e.g. 12,16 (default: so that stages cost about the same)",
        env=("VLLM_PP_LAYER_PARTITION",),
    )  # fmt: skip
    mm_encoder_tp_mode: str = opt(
        "weights", "how ranks share the vision tower: weights: its heads and columns; data: each holds all of it and "
        "encodes images of its own", choices=("weights", "data"),
    )  # fmt: skip
    distributed_executor_backend: str = opt(
        "", "what starts the ranks: mp (processes here and on --nnodes), uni (one rank), external_launcher (torchrun), "
        "ray (actors of a cluster); default: mp, but ray where this machine has too few cards and Ray is installed or "
        "RAY_ADDRESS set",
        choices=("", "mp", "uni", "external_launcher", "ray"), means={"auto": ""},
    )  # fmt: skip
    nnodes: int = opt(1, "machines that the ranks are on, as many on each", aliases=("n",), bound=Bound(1, 1024))
    node_rank: int = opt(0, "number of this machine; the server is on 0", aliases=("r",), bound=Bound(0, 1023))
    master_addr: str = opt("127.0.0.1", "address of machine 0, on which ranks of other machines reach the engine")
    master_port: int = opt(29501, "port of the engine for ranks of other machines", bound=Bound(0, 65535))
    headless: bool = opt(False, "only the ranks of this machine, for the engine at --master-addr")
    allow_tp_over_nodes: bool = opt(False, "layers may be shared by cards of several machines, which is slow")
    group_key_file: str = opt(
        "", "file of 32 bytes or more, the same on each machine: who knows them belongs to the group"
    )
    group_tls_cert: str = opt("", "certificate (PEM) of this machine, for links between machines under TLS")
    group_tls_key: str = opt("", "its private key (PEM)")
    group_tls_ca: str = opt("", "authority (PEM) that signed the certificates of all machines, and nothing else")
    gpu_memory_utilization: float = opt(
        0.9,
        "share of the device's memory that the engine uses",
        aliases=("device_memory_utilization",),
        bound=Bound(0, 1, above=True),
    )
    graph_reserved_mem: float = opt(
        0.1,
        "share of the usable memory that is kept for graphs",
        env=("VLLM_GRAPH_RESERVED_MEM",),
        bound=Bound(0, 1, below=True),
    )
    graph_prompt_ratio: float = opt(
        0.3,
        "share of the graph memory for prompts, the rest is for decoding",
        env=("VLLM_GRAPH_PROMPT_RATIO",),
        bound=SHARE,
    )
    graph_multimodal_prompt_ratio: float = opt(
        0.3, "share of the prompts' graph memory for text, the rest is for images (models with a vision tower)",
        env=("VLLM_GRAPH_MULTIMODAL_PROMPT_RATIO",), bound=SHARE,
    )  # fmt: skip
    graph_prompt_strategy: str = opt(
        "min_tokens", "which prompt graphs come first when memory is short", choices=("min_tokens", "max_bs"),
        env=("VLLM_GRAPH_PROMPT_STRATEGY",),
    )  # fmt: skip
    graph_decode_strategy: str = opt(
        "max_bs", "which decode graphs come first when memory is short", choices=("min_tokens", "max_bs"),
        env=("VLLM_GRAPH_DECODE_STRATEGY",),
    )  # fmt: skip
    graph_memory: str = opt(
        "ratio", "ratio: by the shares above; auto: what an earlier start measured", choices=("ratio", "auto")
    )
    bucket_profile: str = opt(
        "",
        "file of recorded needs (trencadis plan --save-profile), by which the shapes are chosen at start; it is made "
        "if there is none, and the needs of the traffic are added to it every hour and at the end (cuda, hpu)",
    )
    max_graphs: int = opt(
        40,
        "most learned shapes of text and images; those of drawing tokens come on top",
        bound=Bound(1, 4096),
    )
    learn_buckets: str = opt(
        "observe", "shapes from the traffic that is served: observe: record which sizes it needs and report better "
        "shapes; on: also change to them while serving; off: record nothing (cuda, hpu)",
        choices=("off", "observe", "on"),
    )  # fmt: skip
    bucket_half_life: float = opt(
        21_600.0, "seconds of load after which a recorded need counts half", bound=Bound(0, 1e9, above=True)
    )
    record_trace: str = opt("", "file to which the sizes of requests are appended, for trencadis plan --trace")
    warmup: str = opt(
        "full", "full: before serving; background: between steps, the buckets most asked for first; skip: at first use "
        "(VLLM_SKIP_WARMUP)", choices=("full", "skip", "background"),
    )  # fmt: skip
    warmup_stall: float = opt(0.1, "share of the time that background warm-up may take while requests run", bound=SHARE)
    warmup_slice: float = opt(
        0.0,
        "seconds that one pause for background warm-up may last; 0: one bucket a pause",
        bound=SECONDS,
    )
    strict_warmup: bool = opt(False, "a bucket that fails in warm-up ends the start-up")
    skip_captures: list[str] = opt([], "buckets whose capture ended an engine", hidden=True)
    kv_cache_memory_bytes: int | None = opt(
        None,
        "KV cache in bytes, e.g. 256MiB (default: from free memory)",
        kind="bytes",
        bound=BYTES,
    )
    cpu_offload_gb: float = opt(
        0.0, "host memory in GiB, of each rank, for the weights of the last layers, which every launch copies (cuda)",
        bound=Bound(0, 2**20),
    )  # fmt: skip
    kv_offloading_size: float = opt(
        0.0, "host memory in GiB, of all ranks together, for KV blocks, and recurrent states of preempted "
        "sequences, that make room on the device (cuda, hpu)",
        bound=Bound(0, 2**20),
    )  # fmt: skip
    state_snapshot_memory: float = opt(
        0.1, "snapshots of recurrent state, by which models with such layers share prefixes: above 1 in bytes, else a "
        "share of the KV cache's memory; 0: none", kind="amount", bound=Bound(0, 2**50),
    )  # fmt: skip
    kv_cache_dtype: str = opt(
        "auto",
        "type of K and V: auto: the engine's; int8 or fp8: 8 bits and a scale a token and head, which hold about 1.85 "
        "times the tokens",
        choices=("auto", *NAMES),
        later=dict.fromkeys(KV_DTYPES, "K and V have the type of the model, or 8 bits: int8, fp8"),
    )
    kv_cache_scales: str = opt(
        "dynamic",
        "scales of an 8-bit KV cache: dynamic: found for each token and head; checkpoint: those of its file",
        choices=("dynamic", "checkpoint"),
    )
    attention_backend: str = opt(
        "", "what attends to text on cuda: FLASH_ATTN (flash-attn, or torch's), FLASHINFER, or TRITON_ATTN, the own "
        "kernels (default: own kernels, but flash-attn 3 to prompts where it is installed on Hopper)", kind="upper",
        choices=("", *ATTENTION_LIBRARIES, OWN_ATTENTION),
        means={
            **dict.fromkeys([*ATTENTION, *(name + OLDER_ATTENTION for name in ATTENTION)], ""),
            **dict.fromkeys(OWN_ATTENTION_NAMES, OWN_ATTENTION),
            **dict.fromkeys((name + OLDER_ATTENTION for name in OWN_ATTENTION_NAMES), OWN_ATTENTION),
            **{name + OLDER_ATTENTION: name for name in (*ATTENTION_LIBRARIES, OWN_ATTENTION)},
        },
        env=("VLLM_ATTENTION_BACKEND",),
    )  # fmt: skip
    block_size: int | None = opt(None, "tokens of a KV block (default: the device's)", bound=Bound(1, 65536))
    num_gpu_blocks_override: int | None = opt(None, "number of KV blocks, for tests", bound=COUNT)
    enable_prefix_caching: bool = opt(True, "reuse KV blocks of equal prefixes")
    max_num_batched_tokens: int | None = opt(
        None,
        "tokens of one step (default 2048 on CPU, 8192 elsewhere)",
        kind="count",
        bound=COUNT,
    )
    max_num_seqs: int | None = opt(
        None,
        "requests that run at a time (default 128 on CPU, 256 elsewhere)",
        kind="count",
        bound=Bound(1, 65536),
    )
    itl_target: float = opt(
        0.0, "milliseconds that an answer may wait for its next token while prompts of others are computed, which are "
        "then cut smaller; 0: no bound", bound=Bound(0, 600_000),
    )  # fmt: skip
    enable_chunked_prefill: bool = opt(True, "cut long prompts to fit a step's token budget")
    scheduling_policy: str = opt(
        "fcfs",
        "order in which requests run; fair: tenants of --api-key-file get shares by their weights",
        choices=("fcfs", "priority", "fair"),
    )
    enable_lora: bool = opt(False, "requests may name LoRA adapters, which are kept beside the model")
    max_loras: int = opt(1, "adapters on the device, which requests of one step may use", bound=Bound(1, 256))
    max_lora_rank: int = opt(16, "largest rank of an adapter", bound=Bound(1, 512))
    max_cpu_loras: int | None = opt(
        None, "adapters in host memory, those on the device among them; requests that name others read them again "
        "(default: --max-loras, or the number of --lora-modules)", bound=Bound(1, 65536),
    )  # fmt: skip
    batch_invariant: bool = opt(
        False, "the same answer, bit by bit, in any batch and chunking; slower",
        env=("VLLM_BATCH_INVARIANT",),
    )  # fmt: skip
    priority_aging: float = opt(
        30.0, "seconds after which a waiting request rises one priority level", bound=SOME_SECONDS
    )
    async_depth: int | None = opt(
        None, "steps in flight beyond the one being scheduled (default: the device's)", bound=Bound(0, 1)
    )
    speculation: bool = opt(True, "verify guesses of the next tokens where that is faster; answers are the same")
    speculative_config: JsonObject = opt(
        {}, "JSON: method (ngram: what followed the same ids before; suffix: also in recent answers of the server; "
        "draft_model: a smaller model of the same tokenizer; eagle3: a head over hidden states), model (its folder), "
        "num_speculative_tokens (1 to 16), prompt_lookup_max, prompt_lookup_min, disable_by_batch_size", kind="json",
        aliases=("sc",),
    )  # fmt: skip
    spec_method: str = opt(
        "", "its method, as a flag", choices=("", "ngram", "suffix", "draft_model", "eagle3"),
        means={"ngram_gpu": "ngram", "[ngram]": "ngram"},
        later=dict.fromkeys(DRAFT_MODELS, "guesses come from texts, a draft_model or a head of eagle3"),
    )  # fmt: skip
    spec_model: str = opt(
        "", "its model, as a flag: the folder of a draft model or head, or [ngram]", aliases=("speculative_model",)
    )
    spec_tokens: int | None = opt(
        None, "its num_speculative_tokens, as a flag", bound=Bound(1, 16), aliases=("num_speculative_tokens",)
    )
    ngram_prompt_lookup_max: int | None = opt(
        None, "most ids of a suffix that is looked up (default 4)", bound=Bound(1, 16)
    )
    ngram_prompt_lookup_min: int | None = opt(
        None, "fewest ids of a suffix that is looked up (default 2)", bound=Bound(1, 16)
    )
    spec_disable_by_batch_size: int | None = opt(
        None, "running requests from which on nothing is guessed", bound=Bound(1, 65536),
        aliases=("speculative_disable_by_batch_size",),
    )  # fmt: skip
    spec_always: bool = opt(False, "verify guesses whatever they cost, for tests", hidden=True)
    limit_mm_per_prompt: dict[str, int] = opt({}, 'images per prompt: image=4 or {"image": 4}', kind="limits")
    mm_processor_kwargs: JsonObject = opt(
        {}, "JSON: min_pixels and max_pixels of images, fps and the like of videos", kind="json"
    )
    image_alignment: str = opt(
        "pad", "pad: any size, windows padded; resize: sides rounded to 112 pixels, every window full",
        choices=("pad", "resize"),
    )  # fmt: skip
    encoder_cache_images: int | None = opt(
        None, "size of the encoder cache, in images of the largest size (default 4)", bound=Bound(2, 65536)
    )
    mm_processor_cache_gb: float = opt(
        1.0,
        "decoded images that the API process keeps, in GiB",
        env=("VLLM_MM_INPUT_CACHE_GIB",),
        bound=Bound(0, 2**20),
    )
    generation_config: str = opt("auto", "auto: defaults from the model's generation_config.json; vllm: none")
    override_generation_config: JsonObject = opt({}, "JSON over generation_config.json", kind="json")
    max_logprobs: int = opt(
        MAX_LOGPROBS, "most log-probabilities that a request may ask for with each token; -1: the whole vocabulary",
        bound=Bound(-1, 2**31 - 1),
    )  # fmt: skip
    runner: str = opt(
        "auto", "generate: answers; pooling: embeddings and classes; auto: as the checkpoint is made for",
        choices=("auto", "generate", "pooling"),
    )  # fmt: skip
    convert: str = opt(
        "auto", "what a pooling server makes of a model: embed (vectors), classify (a class head, or yes/no logits "
        "of a chat model) or reward (values of every token)", choices=("auto", "none", "embed", "classify", "reward"),
        later={"mm_encoder_only": "the vision tower alone is not served"},
    )  # fmt: skip
    task: str = opt(
        "auto", "older form of --runner and --convert",
        choices=("auto", "generate", "embed", "classify", "reward"),
        means={"embedding": "embed", "score": "classify"}, later={"transcription": "audio is not served"},
    )  # fmt: skip
    pooler_config: JsonObject = opt(
        {}, "JSON: pooling_type (LAST, MEAN, CLS, ALL, STEP), normalize, use_activation, dimensions, logit_bias, "
        "step_tag_id", kind="json",
        aliases=("override_pooler_config",),
    )  # fmt: skip
    hf_overrides: JsonObject = opt(
        {}, "JSON over config.json, read before its keys are checked; objects are merged key by key. Where answers are "
        "pooled, also classifier_from_token, is_matryoshka, matryoshka_dimensions, id2label, num_labels, problem_type",
        kind="json",
    )  # fmt: skip
    report_evictions: bool = opt(False, "the engine is one of several, whose router knows their caches", hidden=True)
    policy: str = opt("", "another policy of the backend, for tests (cpu: padded)", hidden=True)
    threads: int | None = opt(
        None, "CPU threads (default: OMP_NUM_THREADS, else the cores of the affinity and the cgroup)",
        aliases=("cpu_threads",), bound=Bound(1, 4096),
    )  # fmt: skip
    log_level: str = opt(
        "INFO", "smallest level that is logged", choices=("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"),
        env=("VLLM_LOGGING_LEVEL",), kind="upper",
    )  # fmt: skip
    log_config_file: str = opt(
        "", "JSON file of a logging.config.dictConfig, which has the last word on lines of all processes",
        env=("VLLM_LOGGING_CONFIG_PATH",),
    )  # fmt: skip
    log_format: str = opt("text", "text: lines for people; json: one object a line", choices=("text", "json"))
    engine: str = opt(
        "trencadis.core.engine.engine_builder:create_engine", "factory of the engine, for tests", hidden=True
    )

    @property
    def ranks(self) -> int:
        """Total number of ranks of an engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def without_secrets(self) -> EngineConfig:
        """Returns the configuration without keys, for child processes, which do not access the hub."""
        empty: dict[str, Any] = {one.name: "" for one, option in options(self) if option.secret}
        return replace(self, **empty)
