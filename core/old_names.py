"""Former names that plug-ins of other packages may still import, and their current names.

If a plug-in fails because of such a name, the start ends with one line that gives the current name.
"""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Iterator

MODULES = {
    **dict.fromkeys(("backends.conformance.device", "backends.conformance.speed"), "backends.conformance.suite"),
    "backends.conformance.family.by_hand": "backends.conformance.family.recompute",
    "backends.conformance.family.oracle": "backends.conformance.family.transformers_oracle",
    "backends.conformance.family.pictures": "backends.conformance.family.image_checks",
    **dict.fromkeys(("backends.conformance.family.slots", "backends.conformance.rig"), "backends.conformance.harness"),
    "backends.conformance.family.suite": "backends.conformance.family.family_checks",
    "backends.conformance.graphs": "backends.conformance.graph_checks",
    "backends.conformance.ops": "backends.conformance.op_checks",
    "backends.conformance.ops_parts": "backends.conformance.op_checks_layers",
    "backends.conformance.ops_pooling": "backends.conformance.op_checks_layers",
    "backends.conformance.ops_quantised": "backends.conformance.op_checks_layers",
    "backends.conformance.ops_sampling": "backends.conformance.op_checks_sampling",
    "backends.conformance.ops_vision": "backends.conformance.op_checks_vision",
    "backends.conformance.programs": "backends.conformance.program_checks",
    "backends.conformance.result": "backends.conformance.check_result",
    "backends.conformance.subject": "backends.conformance.target",
    "backends.conformance.tokens": "backends.conformance.answer_checks",
    "backends.cpu.comm": "backends.cpu.gloo_comm",
    "backends.cpu.quantised": "backends.cpu.int8_linear",
    "backends.cpu.reference": "backends.cpu.reference_ops",
    "backends.cpu.sampling": "backends.cpu.sampler",
    "core.adapter_ref": "core.request",
    "core.backend": "core.device.backend",
    **dict.fromkeys(("core.checkpoint.archive", "core.models.bin_file"), "core.checkpoint.pytorch_bin"),
    "core.checkpoint.fields": "core.checkpoint.json_fields",
    **dict.fromkeys(("core.checkpoint.formats", "core.checkpoint.formats.raw_weight"), "core.checkpoint.quant_formats"),
    "core.checkpoint.formats.awq": "core.checkpoint.quant_formats",
    "core.checkpoint.formats.bit_packing": "core.checkpoint.quant_formats",
    "core.checkpoint.formats.compressed_tensors": "core.checkpoint.quant_formats",
    "core.checkpoint.formats.format_table": "core.checkpoint.quant_formats",
    **dict.fromkeys(("core.checkpoint.formats.fp8", "core.checkpoint.formats.gptq"), "core.checkpoint.quant_formats"),
    "core.checkpoint.formats.mxfp4": "core.checkpoint.quant_formats",
    **dict.fromkeys(("core.checkpoint.kv_cache_config", "core.checkpoint.kv_config"), "core.checkpoint.pooler_config"),
    "core.checkpoint.label_tokens": "core.checkpoint.pooler_config",
    "core.checkpoint.opcodes": "core.checkpoint.pickle_reader",
    "core.checkpoint.pooling": "core.checkpoint.pooling_config",
    "core.checkpoint.reading": "core.checkpoint.config_reader",
    **dict.fromkeys(("core.checkpoint.share", "core.checkpoint.stage_share"), "core.checkpoint.model_config"),
    "core.checkpoint.vision_config": "core.vision_config",
    "core.checkpoint.zip_directory": "core.checkpoint.pytorch_bin",
    "core.constraints": "core.structured_outputs",
    **dict.fromkeys(("core.families.granite", "core.families.seed_oss"), "core.families.llama"),
    **dict.fromkeys(("core.families.ministral3", "core.families.mixtral"), "core.families.mistral"),
    "core.families.olmo3": "core.families.olmo2",
    "core.families.qwen2_moe": "core.families.qwen2",
    "core.families.qwen3_5_moe": "core.families.qwen3_5",
    "core.families.qwen3_moe": "core.families.qwen3",
    "core.families.smollm3": "core.families.llama",
    "core.families.xlm_roberta": "core.families.bert",
    **dict.fromkeys(("core.graphs.oom_errors", "core.nearest", "multimodal.errors"), "core.errors"),
    **dict.fromkeys(("core.kv.media_spans", "core.kv.spans"), "core.media_spans"),
    "core.launches.communicators": "core.device.communicators",
    **dict.fromkeys(("core.launches.launch_tensors", "core.launches.tensors"), "core.device.launch_tensors"),
    "core.layers": "core.models",
    **dict.fromkeys(("core.layers.apart", "core.layers.embedding", "core.layers.linear"), "core.models.linear"),
    **dict.fromkeys(("core.layers.attention", "core.layers.partial"), "core.models.attention"),
    **dict.fromkeys(("core.layers.cross_attention", "core.layers.crossing"), "core.models.cross_attention"),
    **dict.fromkeys(("core.layers.experts", "core.layers.moe"), "core.models.moe"),
    **dict.fromkeys(("core.layers.kv_cache_codes", "core.quant.kv_cache_codes"), "core.models.kv_cache_codes"),
    **dict.fromkeys(("core.layers.mlp", "core.layers.norm", "core.models.norm"), "core.models.mlp"),
    "core.layers.model_interface": "core.models.interface",
    **dict.fromkeys(("core.layers.partial_rotary", "core.layers.rope"), "core.models.attention"),
    "core.layers.pooler": "core.models.pooler",
    **dict.fromkeys(("core.layers.replicated", "core.models.embedding"), "core.models.linear"),
    **dict.fromkeys(("core.layers.rotary_embedding", "core.models.rotary_embedding"), "core.models.attention"),
    **dict.fromkeys(("core.layers.source", "core.layers.weight_source"), "core.checkpoint.weight_source"),
    "core.layout": "core.shared_constants",
    **dict.fromkeys(("core.models.checkpoint_source", "core.models.collected"), "core.checkpoint.checkpoint_source"),
    **dict.fromkeys(("core.models.cross_attention_decoder", "core.models.crossing"), "core.models.cross_attention"),
    "core.models.family": "core.checkpoint.family",
    "core.models.interleaved_projections": "core.models.gated_delta",
    **dict.fromkeys(("core.models.loader", "core.models.weight_loader"), "core.checkpoint.weight_loader"),
    **dict.fromkeys(("core.models.packed_file", "core.models.packed_weights"), "core.device.packed_weights"),
    **dict.fromkeys(("core.models.passing", "core.models.stage_entry"), "core.models.decoder"),
    "core.models.pytorch_bin": "core.checkpoint.pytorch_bin",
    "core.models.registry": "core.checkpoint.registry",
    "core.models.weight_files": "core.weight_files",
    **dict.fromkeys(("core.name_suggestions", "multimodal.error_params"), "core.errors"),
    **dict.fromkeys(("core.quant.formats", "core.quant.formats.awq"), "core.checkpoint.quant_formats"),
    "core.quant.formats.bit_packing": "core.checkpoint.quant_formats",
    "core.quant.formats.compressed_tensors": "core.checkpoint.quant_formats",
    **dict.fromkeys(("core.quant.formats.format_table", "core.quant.formats.fp8"), "core.checkpoint.quant_formats"),
    **dict.fromkeys(("core.quant.formats.gptq", "core.quant.formats.raw"), "core.checkpoint.quant_formats"),
    **dict.fromkeys(("core.quant.formats.raw_weight", "core.quant.formats.table"), "core.checkpoint.quant_formats"),
    "core.quant.formats.words": "core.checkpoint.quant_formats",
    **dict.fromkeys(("core.quant.kv", "core.quant.kv_cache_format"), "core.kv_cache_format"),
    "core.quant.kv_codes": "core.models.kv_cache_codes",
    "core.quant.online": "core.quant.online_quant",
    "core.quant.tensor": "core.quant.quantised_tensor",
    "core.quant.writing.convert": "core.quant.writing.convert_checkpoint",
    "core.quant.writing.files": "core.quant.writing.safetensors_writer",
    **dict.fromkeys(("core.quant.writing.gptq", "core.quant.writing.rounding"), "core.quant.writing.layer_rounding"),
    "core.quant.writing.stored": "core.quant.writing.source_checkpoint",
    "core.shapes.cross_attention_inputs": "core.cross_attention_inputs",
    **dict.fromkeys(("multimodal.colours", "multimodal.tiles.fine"), "multimodal.normalisation"),
    "multimodal.decode_workers.job_table": "multimodal.decode_workers.worker_main",
    **dict.fromkeys(("multimodal.deep", "multimodal.deepstack"), "multimodal.qwen3_vl"),
    **dict.fromkeys(("multimodal.deep.config", "multimodal.deepstack.config"), "multimodal.qwen3_vl.config"),
    **dict.fromkeys(("multimodal.deep.tower", "multimodal.deepstack.deepstack_tower"), "multimodal.qwen3_vl.model"),
    "multimodal.gather": "multimodal.async_gather",
    "multimodal.gemma3.config": "multimodal.gemma3.family",
    "multimodal.glm4v.tower": "multimodal.glm4v.model",
    **dict.fromkeys(("multimodal.grids", "multimodal.packing", "multimodal.patch_grids"), "multimodal.patch_packing"),
    **dict.fromkeys(("multimodal.hf_text_config", "multimodal.texts"), "multimodal.vit.hf_config"),
    **dict.fromkeys(("multimodal.images.array_images", "multimodal.images.arrays"), "multimodal.images.image_decoder"),
    **dict.fromkeys(("multimodal.images.cache", "multimodal.uuids"), "multimodal.images.processor_cache"),
    **dict.fromkeys(("multimodal.images.decode", "multimodal.images.image_job"), "multimodal.images.pil_decode"),
    "multimodal.images.decoder": "multimodal.images.image_decoder",
    "multimodal.images.frontend": "multimodal.images.image_frontend",
    "multimodal.images.header": "multimodal.images.image_header",
    "multimodal.images.jobs": "multimodal.images.pil_decode",
    **dict.fromkeys(("multimodal.images.limits", "multimodal.options"), "multimodal.media_options"),
    "multimodal.images.mm_processor_kwargs": "multimodal.media_options",
    **dict.fromkeys(("multimodal.lines", "multimodal.mistral3", "multimodal.pixtral_tower"), "multimodal.pixtral"),
    **dict.fromkeys(("multimodal.lines.config", "multimodal.pixtral.fields"), "multimodal.pixtral.config"),
    **dict.fromkeys(("multimodal.lines.model", "multimodal.pixtral_tower.model"), "multimodal.pixtral.model"),
    "multimodal.llava.clip": "multimodal.llava.family",
    "multimodal.llava.clip_config": "multimodal.llava.family",
    "multimodal.media_uuids": "multimodal.images.processor_cache",
    "multimodal.mistral3.family": "multimodal.pixtral.family",
    **dict.fromkeys(("multimodal.mllama_tower", "multimodal.stacks"), "multimodal.mllama"),
    **dict.fromkeys(("multimodal.mllama_tower.config", "multimodal.stacks.config"), "multimodal.mllama.config"),
    **dict.fromkeys(("multimodal.mllama_tower.model", "multimodal.stacks.model"), "multimodal.mllama.model"),
    **dict.fromkeys(("multimodal.near", "multimodal.position_interpolation"), "multimodal.qwen3_vl.config"),
    **dict.fromkeys(("multimodal.pixtral.names", "multimodal.pixtral.pixtral_hf_config"), "multimodal.pixtral.config"),
    "multimodal.pixtral.pixtral_weight_names": "multimodal.pixtral.config",
    "multimodal.pixtral_tower.config": "multimodal.pixtral.config",
    **dict.fromkeys(("multimodal.prepared_video", "multimodal.videos.items"), "multimodal.processor"),
    "multimodal.qwen2_5_vl.packing": "multimodal.qwen2_5_vl.window_packing",
    "multimodal.qwen2_vl.config_fields": "multimodal.qwen2_vl.qwen_vl_hf_config",
    "multimodal.qwen2_vl.geometry": "multimodal.qwen2_vl.config",
    "multimodal.qwen2_vl.image_budget": "multimodal.qwen2_vl.smart_resize",
    "multimodal.qwen2_vl.media_tokens": "multimodal.qwen2_vl.qwen_vl_hf_config",
    **dict.fromkeys(("multimodal.qwen2_vl.needs", "multimodal.qwen2_vl.sizes"), "multimodal.qwen2_vl.smart_resize"),
    "multimodal.qwen2_vl.patch_geometry": "multimodal.qwen2_vl.config",
    "multimodal.qwen2_vl.preprocessing": "multimodal.qwen2_vl.preprocessor_config",
    **dict.fromkeys(("multimodal.qwen2_vl.tower", "multimodal.qwen2_vl.vision_tower"), "multimodal.qwen2_vl.model"),
    "multimodal.qwen3_vl.deepstack_tower": "multimodal.qwen3_vl.model",
    "multimodal.qwen3_vl.pictures": "multimodal.qwen3_vl.processor",
    "multimodal.qwen3_vl.qwen3_5_family": "multimodal.qwen3_vl.family",
    "multimodal.smolvlm": "multimodal.idefics3",
    "multimodal.smolvlm.family": "multimodal.idefics3.family",
    **dict.fromkeys(("multimodal.sources.addresses", "multimodal.sources.fetch"), "multimodal.sources.http_fetch"),
    "multimodal.sources.loader": "multimodal.sources.media_loader",
    "multimodal.sources.url_rules": "multimodal.sources.http_fetch",
    "multimodal.stages": "multimodal.media_timing",
    "multimodal.tiles": "multimodal.vit",
    "multimodal.tiles.config": "multimodal.vit.config",
    **dict.fromkeys(("multimodal.tiles.fields", "multimodal.vit.hf_vision_config"), "multimodal.vit.hf_config"),
    "multimodal.tiles.model": "multimodal.vit.model",
    "multimodal.tiles.processor": "multimodal.vit.processor",
    **dict.fromkeys(("multimodal.videos.animation", "multimodal.videos.file"), "multimodal.videos.video_file"),
    "multimodal.videos.clips": "multimodal.videos.frame_sampling",
    "multimodal.videos.frontend": "multimodal.videos.video_frontend",
    "multimodal.videos.hf_frame_sampling": "multimodal.videos.frame_sampling",
    "multimodal.videos.jobs": "multimodal.videos.video_job",
    "multimodal.videos.prepared_video": "multimodal.processor",
    "multimodal.videos.sampling": "multimodal.videos.frame_sampling",
    **dict.fromkeys(("multimodal.videos.spoken", "multimodal.videos.text_timestamps"), "multimodal.placeholders"),
    "multimodal.vit": "multimodal.vit.base_config",
    "multimodal.vit.fixed_point_pixels": "multimodal.normalisation",
    "multimodal.vit_block": "multimodal.vit.vit_block",
    "multimodal.workers": "multimodal.decode_workers",
    **dict.fromkeys(("multimodal.workers.jobs", "multimodal.workers.worker"), "multimodal.decode_workers.worker_main"),
    "multimodal.workers.pipe": "multimodal.decode_workers.worker_messages",
    "multimodal.workers.pool": "multimodal.decode_workers.worker_pool",
    "multimodal.workers.process": "multimodal.decode_workers.worker_process",
    **dict.fromkeys(("server.reasoning.forms", "server.reasoning.parser"), "server.tools.reasoning_parser"),
    "server.text.incremental": "server.text.incremental_parser",
    **dict.fromkeys(("server.tools.forms", "server.tools.reasoning_parser_registry"), "server.tools.parser_registry"),
    **dict.fromkeys(("server.tools.hermes", "server.tools.llama3"), "server.tools.json_tool_parsers"),
    "server.tools.mistral": "server.tools.json_tool_parsers",
    "server.tools.parser": "server.tools.tool_parser",
    "server.tools.pythonic": "server.tools.pythonic_tool_parser",
    **dict.fromkeys(("server.tools.qwen3", "server.tools.qwen3_values"), "server.tools.qwen3_tool_parser"),
    "server.tools.tool_parser_registry": "server.tools.parser_registry",
}
"""Former modules, without ``trencadis.`` -> their current names."""

NAMES = {
    "CLASH": "UUID_CONFLICT",
    "CROSSING": "CUT_WIDTHS",
    "CellEntry": "TilePatchEmbed",
    "CellExit": "TileProjector",
    "Collected": "CheckpointSource",
    "Columns": "ColumnParallelLinear",
    "CrossDecoder": "CrossAttentionDecoder",
    "CrossLayer": "CrossAttentionLayer",
    "DeepTower": "DeepStackVisionConfig",
    "Deepening": "DeepStackAdd",
    "Described": "ParsedConfig",
    "Dummy": "DummyWeights",
    "Entry": "DecoderEntry",
    "Exit": "DecoderExit",
    "FILES": "PROCESSOR_FILES",
    "FIXED": "FIXED_SIZE_MESSAGE",
    "Fields": "JsonFields",
    "FineEntry": "FixedPointPatchEmbed",
    "Grid": "TileGrid",
    "Head": "LMHead",
    "Held": "DeviceShare",
    "HermesParser": "HermesToolParser",
    "ImageOutline": "ImageGeometry",
    "Layer": "DecoderLayer",
    "Leaving": "PendingSend",
    "LineEntry": "PixtralPatchEmbed",
    "LineExit": "PixtralProjector",
    "LineModel": "PixtralModel",
    "LineTower": "PixtralVisionConfig",
    "Llama3Parser": "Llama3ToolParser",
    "MOST_PIXELS": "MAX_SIDE_PIXELS",
    "MOST_TILES": "MAX_TILES",
    "Merger": "DeepStackMerger",
    "MistralParser": "MistralToolParser",
    "MixedEntry": "DeepStackPatchEmbed",
    "MixedTower": "DeepStackTower",
    "Named": "PickleName",
    "PartlyTurned": "PartialRotarySource",
    "PassedEntry": "StageEntry",
    "Prepared": "PreparedImage",
    "PythonicParser": "PythonicToolParser",
    "Qwen3Parser": "Qwen3ToolParser",
    "ReasoningForm": "ReasoningFormat",
    "Rows": "RowParallelLinear",
    "STEPS": "PLANE_WEIGHTS",
    "Sampling": "SamplingHead",
    "ScaledBlock": "LayerScaleBlock",
    "SeeingOps": "CrossAttentionOps",
    "SeenTensors": "CrossAttentionTensors",
    "SiglipTower": "SiglipVisionConfig",
    "Source": "WeightSource",
    "Spoken": "AnswerContent",
    "Square": "SquareImage",
    "StackBlock": "MllamaVisionBlock",
    "StackEntry": "MllamaPatchEmbed",
    "StackTurn": "MllamaPostTileEmbedding",
    "Stored": "MappedWeights",
    "TAKEN": "DEFAULT_INTERMEDIATE_LAYERS",
    "TAPS": "BICUBIC_TAPS",
    "TURNING": "ROTATED",
    "Table": "BucketTable",
    "TakenRows": "PlaceholderRun",
    "Thought": "ReasoningContent",
    "TileModel": "TileVisionModel",
    "TileProcessor": "TileImageProcessor",
    "TileTower": "TileVisionConfig",
    "TwoStackModel": "MllamaModel",
    "TwoStackTower": "MllamaVisionConfig",
    "UNIT": "TILE_ALIGNMENT",
    "Usual": "ViTDefaults",
    "UuidBook": "UuidRegistry",
    "WholeParts": "ReplicatedBackend",
    "aligned": "align_up",
    "arena_rows": "arena_row_numbers",
    "held_whole": "replicate_layers",
    "installed": "installed_families",
    "loaded": "import_object",
    "processor_of": "build_processor",
    "scaled": "scale_frequencies",
    "spread": "scale_and_shift",
    "together": "merge_or_separate",
}
"""Former names of classes, functions and constants of any of these modules -> current names."""

MEMBERS = {
    "Attention": {"turned": "rotary_dim", "form": "kv_format"},
    "CrossAttention": {"stored": "compute_arena_rows"},
    "CrossAttentionOps": {"attend_pictures": "cross_attend", "attend_rows": "cross_attend_rows"},
    "FixedPointPatchEmbed": {"values": "normalise_pixels"},
    "HermesToolParser": {"grammar": "parse", "call": "call_rule", "walls": "stop_marks"},
    "ImageGeometry": {"prepared": "make_prepared"},
    "ImageNeeds": {"pictures": "images"},
    "IncrementalParser": {
        "grammar": "parse",
        "ahead": "peek",
        "sees": "match_literal",
        "takes": "take_literal",
        "until": "read_until",
        "run_of": "read_run",
        "_taken": "_take_events",
    },
    "KeepingOps": {"loaded": "finish_loading"},
    "LayerScaleBlock": {"of_attention": "attention_scale", "of_mlp": "mlp_scale"},
    "Linear": {"pack_apart": "pack_separately"},
    "Memory": {"backed": "real_kv_bytes"},
    "ModelConfig": {
        "aligned": "alignment_unit",
        "placed": "placeholder_token",
        "placed_token": "template_token",
        "own_towers": "encoder_data_parallel",
        "sees": "encodes_images",
    },
    "PartialRotarySource": {"quantised": "take_quantised", "stacked": "take_stacked"},
    "PlaceholderRun": {"shown": "visible_rows"},
    "Pooler": {"load_words": "load_label_tokens"},
    "Processor": {"sizes": "compute_geometry"},
    "ReasoningFormat": {"parser": "make_parser", "state": "find_state"},
    "RowParallelLinear": {"summed": "reduce"},
    "TextConfig": {
        "place": "norm_placement",
        "turned": "rotary_dim",
        "joined": "bidirectional_images",
        "cross": "cross_attention_layers",
    },
    "TextRotary": {"far": "long_axis"},
    "TilePatchEmbed": {"table": "position_table", "colours": "scale_shift", "values": "normalise_pixels"},
    "TileProjector": {"enter": "linear_1", "leave": "linear_2"},
    "TileVisionConfig": {
        "crossing": "cut_widths",
        "real": "real_slots",
        "tile": "slots_per_tile",
        "most_tiles": "max_tiles",
        "places": "patch_positions",
        "tokens": "rows_per_tile",
        "exit_matrices": "projector_matrices",
        "beside": "other_weights",
        "out": "attention_out",
    },
    "TileVisionModel": {
        "see": "patch_embed",
        "tell": "projector",
        "places": "load_position_table",
        "constant_rows": "load_constant_rows",
        "projected": "project_cells",
    },
    "ToolParser": {
        "collected": "collect_value",
        "call": "call_rule",
        "calls": "calls_rule",
        "amid": "free_text_rule",
        "say": "add_content",
        "say_blanks": "add_pending_blanks",
        "start": "start_call",
        "argue": "add_arguments",
        "end": "end_call",
        "accepts": "is_accepted_name",
        "content_until": "read_content_until",
        "attempt": "try_calls",
        "call_objects": "read_call_objects",
        "call_object": "read_call_object",
        "value": "read_value",
        "composite": "read_composite",
        "string": "read_string",
        "word": "read_word",
        "walls": "stop_marks",
        "joint": "call_separator",
    },
    "ViTBlock": {"names": "config", "qkv_at": "qkv_prefix"},
    "ViTConfig": {
        "stored": "count_weights",
        "held": "count_rank_weights",
        "exit_matrices": "projector_matrices",
        "beside": "other_weights",
        "embedded": "patch_embed_inputs",
        "filled": "pads_to_unit",
        "planes": "bytes_per_value",
        "layers_at": "layer_prefix",
        "out": "attention_out",
        "columns": "mlp_in",
        "down": "mlp_out",
        "norm": "norm_weights",
    },
    "VideoProcessor": {"frames": "frame_limits"},
    "WeightSource": {"quantised": "take_quantised", "stacked": "take_stacked"},
}
"""Current class name -> former names of methods, attributes and constructor arguments -> current names."""


def find_successors(error: BaseException) -> str:
    """Returns "; OLD is called NEW now" for each renamed name that ``error`` is about; "" if there is none.

    Args:
        error: what importing or calling a plug-in raised: ImportError, AttributeError or TypeError.
    """
    if isinstance(error, ImportError):
        pairs = [*_renamed_imports(error)]
    elif isinstance(error, AttributeError):
        pairs = [*_renamed_attribute(error)]
    elif isinstance(error, TypeError):
        pairs = [*_renamed_keyword(str(error))]
    else:
        pairs = []
    return "".join(f"; {old} is called {new} now" for old, new in dict.fromkeys(pairs))


def find_old_members(subject: type) -> str:
    """Returns the same as ``find_successors``, for methods and attributes that a plug-in's class defines by former
    names.
    """
    pairs = [
        (f"{subject.__name__}.{old}", new)
        for base in subject.__mro__[1:]
        for old, new in MEMBERS.get(base.__name__, {}).items()
        if old in vars(subject) and base.__module__.startswith("trencadis.")
    ]
    return "".join(f"; {old} is called {new} now" for old, new in dict.fromkeys(pairs))


def _renamed_imports(error: ImportError) -> Iterator[tuple[str, str]]:
    """Yields (old, new) for the module and the names of the failing import statement."""
    statement = _failing_import(error)
    module = (statement.module if isinstance(statement, ast.ImportFrom) else None) or error.name or ""
    inside = module.removeprefix("trencadis.")
    if not module.startswith("trencadis."):
        return
    if inside in MODULES:
        yield module, f"trencadis.{MODULES[inside]}"
    for alias in statement.names if isinstance(statement, ast.ImportFrom) else ():
        if alias.name in NAMES:
            yield alias.name, NAMES[alias.name]
        elif f"{inside}.{alias.name}" in MODULES:
            yield f"{module}.{alias.name}", f"trencadis.{MODULES[f'{inside}.{alias.name}']}"


def _failing_import(error: ImportError) -> ast.stmt | None:
    """Returns the import statement that raised ``error``, read from its source; None if it cannot be found."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    if not frames or frames[-1].lineno is None:
        return None
    frame = frames[-1]
    first, last = frame.lineno or 0, getattr(frame, "end_lineno", None) or frame.lineno or 0
    lines = [linecache.getline(frame.filename, n).strip() for n in range(first, last + 1)]
    try:
        body = ast.parse(" ".join(lines)).body
    except SyntaxError:
        return None
    return body[0] if body else None


def _renamed_attribute(error: AttributeError) -> Iterator[tuple[str, str]]:
    """Yields (old, new) for a former attribute of a module, a class or an instance of this package."""
    name, owner = error.name or "", error.obj
    module = str(getattr(owner, "__name__", ""))
    if module.startswith("trencadis."):
        inside = f"{module}.{name}".removeprefix("trencadis.")
        if inside in MODULES:
            yield f"trencadis.{inside}", f"trencadis.{MODULES[inside]}"
        elif name in NAMES:
            yield name, NAMES[name]
        return
    for base in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if name in MEMBERS.get(base.__name__, {}) and base.__module__.startswith("trencadis."):
            yield f"{base.__name__}.{name}", MEMBERS[base.__name__][name]


def _renamed_keyword(message: str) -> Iterator[tuple[str, str]]:
    """Yields (old, new) for a field that a constructor of this package no longer accepts."""
    found = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", message)
    if found is not None and found[2] in MEMBERS.get(found[1], {}):
        yield f"{found[1]}({found[2]}=)", MEMBERS[found[1]][found[2]]
