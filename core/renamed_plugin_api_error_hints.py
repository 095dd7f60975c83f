"""Former names that plug-ins of other packages may still import, and their current names.

If a plug-in fails because of such a name, the start ends with one line that gives the current name.
"""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Iterator
from importlib.util import find_spec

_FORMER_MODULES = {
    "backends.conformance.answer_checks": "backends.conformance.tokens",
    "backends.conformance.backend_under_test": "backends.conformance.subject backends.conformance.target",
    "backends.conformance.check_model.checkpoint_checks": "backends.conformance.check_model.suite",
    "backends.conformance.check_model.compared_images": """
        backends.conformance.check_model.image_checks backends.conformance.check_model.pictures""",
    "backends.conformance.check_model.cpu_reference_model": """
        backends.conformance.check_model.by_hand backends.conformance.check_model.recompute""",
    "backends.conformance.check_model.transformers_oracle": "backends.conformance.check_model.oracle",
    "backends.conformance.check_result": "backends.conformance.result",
    "backends.conformance.check_suite": """
        backends.conformance.device backends.conformance.speed backends.conformance.suite""",
    "backends.conformance.launch_harness": """
        backends.conformance.check_model.slots backends.conformance.harness backends.conformance.rig""",
    "backends.conformance.memory_checks": "backends.conformance.graph_checks backends.conformance.graphs",
    "backends.conformance.op_checks": "backends.conformance.ops",
    "backends.conformance.op_checks_layers": """
        backends.conformance.ops_parts backends.conformance.ops_pooling backends.conformance.ops_quantised""",
    "backends.conformance.op_checks_sampling": "backends.conformance.ops_sampling",
    "backends.conformance.op_checks_vision": "backends.conformance.ops_vision",
    "backends.conformance.program_checks": "backends.conformance.programs",
    "backends.cpu.gloo_comm": "backends.cpu.comm",
    "backends.cpu.int8_linear": "backends.cpu.quantised",
    "backends.cpu.native.bounds_checks": "backends.cpu.native.checks",
    "backends.cpu.reference_ops": "backends.cpu.reference",
    "backends.cpu.sampler": "backends.cpu.sampling",
    "backends.cuda.kernels.gpu_platform": "backends.cuda.kernels.torch_device_module",
    "backends.cuda.kernels.paged_attention_loop": "backends.cuda.kernels.paged_keys",
    "backends.fault_injection_hooks": "backends.fault_injection backends.hooks",
    "core.bucket_lookup": "core.bucket_plan",
    "core.checkpoint.checkpoint_weight_source": """
        core.checkpoint.checkpoint_source core.models.checkpoint_source core.models.collected""",
    "core.checkpoint.config_reader": "core.checkpoint.reading",
    "core.checkpoint.decoder_config_parsers": "core.checkpoint.decoder_fields",
    "core.checkpoint.decoder_layer_config": "core.checkpoint.layer_parts",
    "core.checkpoint.family": "core.models.family",
    "core.checkpoint.json_fields": "core.checkpoint.fields",
    "core.checkpoint.model_config": "core.checkpoint.share core.checkpoint.stage_share",
    "core.checkpoint.model_registry": "core.checkpoint.registry core.models.registry",
    "core.checkpoint.pooling_config_reader": """
        core.checkpoint.kv_cache_config core.checkpoint.kv_config core.checkpoint.label_tokens
        core.checkpoint.pooler_config core.checkpoint.pooling_resolver""",
    "core.checkpoint.pooling_description": "core.checkpoint.pooling core.checkpoint.pooling_config",
    "core.checkpoint.pytorch_bin": """
        core.checkpoint.archive core.checkpoint.zip_directory core.models.bin_file core.models.pytorch_bin""",
    "core.checkpoint.quantised_tensor_readers": """
        core.checkpoint.formats core.checkpoint.formats.awq core.checkpoint.formats.bit_packing
        core.checkpoint.formats.compressed_tensors core.checkpoint.formats.format_table core.checkpoint.formats.fp8
        core.checkpoint.formats.gptq core.checkpoint.formats.mxfp4 core.checkpoint.formats.raw_weight
        core.checkpoint.quant_formats core.quant.formats core.quant.formats.awq core.quant.formats.bit_packing
        core.quant.formats.compressed_tensors core.quant.formats.format_table core.quant.formats.fp8
        core.quant.formats.gptq core.quant.formats.raw core.quant.formats.raw_weight core.quant.formats.table
        core.quant.formats.words""",
    "core.checkpoint.state_dict_pickle": "core.checkpoint.opcodes core.checkpoint.pickle_reader",
    "core.checkpoint.weight_file_reader": "core.checkpoint.weight_loader core.models.loader core.models.weight_loader",
    "core.checkpoint.weight_prefetch": "core.checkpoint.prefetch",
    "core.checkpoint.weight_source_interface": """
        core.checkpoint.weight_source core.layers.source core.layers.weight_source""",
    "core.cross_attention_inputs": "core.shapes.cross_attention_inputs",
    "core.device.backend": "core.backend",
    "core.device.communicators_and_rank_agreement": "core.device.communicators core.launches.communicators",
    "core.device.launch_tensors": "core.launches.launch_tensors core.launches.tensors",
    "core.device.packed_weights_file": "core.models.packed_file core.models.packed_weights",
    "core.device_shape_policy": "core.device_policy",
    "core.engine_config": "core.config",
    "core.errors": """
        core.graphs.oom_errors core.name_suggestions core.nearest multimodal.error_params multimodal.errors""",
    "core.executor.engine_process_launcher": "core.executor.engine_launcher core.executor.spawn",
    "core.executor.ray_broker_process": "core.executor.ray_broker",
    "core.executor.rendezvous": "core.executor.process_groups",
    "core.family_configs": "core.families",
    "core.family_configs.bert": "core.families.xlm_roberta",
    "core.family_configs.llama": "core.families.granite core.families.seed_oss core.families.smollm3",
    "core.family_configs.mistral": "core.families.ministral3 core.families.mixtral",
    "core.family_configs.olmo2": "core.families.olmo3",
    "core.family_configs.qwen2": "core.families.qwen2_moe",
    "core.family_configs.qwen3": "core.families.qwen3_moe",
    "core.family_configs.qwen3_5": "core.families.qwen3_5_moe",
    "core.flag_declaration": "core.flag_options",
    "core.kv_cache_format": "core.quant.kv core.quant.kv_cache_format",
    "core.links.authenticated_link": "core.links.keyed_link",
    "core.links.message_link": "core.links.link",
    "core.media_spans": "core.kv.media_spans core.kv.spans",
    "core.models": "core.layers",
    "core.models.attention": "core.layers.attention",
    "core.models.decoder": "core.models.passing core.models.stage_entry",
    "core.models.decoder_layer": "core.models.layer_inputs core.models.per_layer_embeddings",
    "core.models.gated_delta": "core.models.interleaved_projections",
    "core.models.image_cross_attention": """
        core.layers.cross_attention core.layers.crossing core.models.cross_attention core.models.cross_attention_decoder
        core.models.crossing""",
    "core.models.kv_cache_quantisation": """
        core.layers.kv_cache_codes core.models.kv_cache_codes core.quant.kv_cache_codes core.quant.kv_codes""",
    "core.models.linear_and_embedding": """
        core.layers.apart core.layers.embedding core.layers.linear core.layers.replicated core.models.embedding
        core.models.linear""",
    "core.models.mlp_and_norms": "core.layers.mlp core.layers.norm core.models.mlp core.models.norm",
    "core.models.model_and_ops_api": "core.layers.model_interface core.models.interface",
    "core.models.moe": "core.layers.experts core.layers.moe",
    "core.models.pooler": "core.layers.pooler",
    "core.models.rotary_embedding": """
        core.layers.partial core.layers.partial_rotary core.layers.rope core.layers.rotary_embedding""",
    "core.output_constraints": "core.constraints core.structured_outputs",
    "core.quant.online_quant": "core.quant.online",
    "core.quant.quantised_tensor": "core.quant.tensor",
    "core.quant.quantised_weight_layout_and_bytes": """
        core.quant.quantisation_scheme core.quant.scheme core.quant.weight_storage_format""",
    "core.quant.writing.convert_checkpoint": "core.quant.writing.convert",
    "core.quant.writing.gptq_rounding": """
        core.quant.writing.gptq core.quant.writing.layer_rounding core.quant.writing.rounding""",
    "core.quant.writing.safetensors_writer": "core.quant.writing.files",
    "core.quant.writing.source_checkpoint": "core.quant.writing.stored",
    "core.renamed_plugin_api_error_hints": "core.old_names core.renamed_plugin_api",
    "core.request": "core.adapter_ref",
    "core.spec.draft_proposer_interface": "core.spec.draft_source core.spec.draft_proposer",
    "core.startup_progress_and_warmup_pacing": "core.progress core.startup_progress",
    "core.token_masks": "core.masks",
    "core.token_masks.grammar_tokenizer_and_vocabulary": """
        core.token_masks.canonical_tokens core.token_masks.grammar_vocabulary""",
    "core.vision_config": "core.checkpoint.vision_config",
    "core.weight_files": "core.models.weight_files",
    "multimodal.convert_to_rgb": "multimodal.rgb_images",
    "multimodal.decode_workers": "multimodal.workers",
    "multimodal.decode_workers.worker_main": """
        multimodal.decode_workers.job_table multimodal.workers.jobs multimodal.workers.worker""",
    "multimodal.decode_workers.worker_messages": "multimodal.workers.pipe",
    "multimodal.decode_workers.worker_pool": "multimodal.workers.pool",
    "multimodal.decode_workers.worker_process": "multimodal.workers.process",
    "multimodal.gemma3.family": "multimodal.gemma3.config",
    "multimodal.glm4v.model": "multimodal.glm4v.tower",
    "multimodal.idefics3": "multimodal.smolvlm",
    "multimodal.idefics3.family": "multimodal.smolvlm.family",
    "multimodal.images.image_decode_client": """
        multimodal.images.array_images multimodal.images.arrays multimodal.images.decoder
        multimodal.images.image_decoder""",
    "multimodal.images.image_frontend": "multimodal.images.frontend",
    "multimodal.images.image_header": "multimodal.images.header",
    "multimodal.images.pil_decode": "multimodal.images.decode multimodal.images.image_job multimodal.images.jobs",
    "multimodal.images.processor_cache": "multimodal.images.cache",
    "multimodal.llava.family": "multimodal.llava.clip multimodal.llava.clip_config multimodal.llava.config",
    "multimodal.llava_next.family": "multimodal.llava_next.config",
    "multimodal.media_parts_and_mm_processor_kwargs": """
        multimodal.images.limits multimodal.images.mm_processor_kwargs multimodal.media_options multimodal.options""",
    "multimodal.media_timing_and_concurrency": """
        multimodal.async_gather multimodal.gather multimodal.media_tasks multimodal.media_timing multimodal.stages""",
    "multimodal.media_uuids": "multimodal.uuids",
    "multimodal.mllama": "multimodal.mllama_tower multimodal.stacks",
    "multimodal.mllama.config": "multimodal.mllama_tower.config multimodal.stacks.config",
    "multimodal.mllama.model": "multimodal.mllama_tower.model multimodal.stacks.model",
    "multimodal.patch_packing": "multimodal.grids multimodal.packing multimodal.patch_grids",
    "multimodal.phi3_v.family": "multimodal.phi3_v.config",
    "multimodal.pixel_normalisation_and_fixed_point": """
        multimodal.colours multimodal.normalisation multimodal.pixel_normalisation multimodal.tiles.fine
        multimodal.vit.fixed_point_pixels""",
    "multimodal.pixtral": "multimodal.lines multimodal.mistral3 multimodal.pixtral_tower",
    "multimodal.pixtral.config": """
        multimodal.lines.config multimodal.pixtral.fields multimodal.pixtral.names multimodal.pixtral.pixtral_hf_config
        multimodal.pixtral.pixtral_weight_names multimodal.pixtral_tower.config""",
    "multimodal.pixtral.family": "multimodal.mistral3.family",
    "multimodal.pixtral.model": "multimodal.lines.model multimodal.pixtral_tower.model",
    "multimodal.placeholders": "multimodal.videos.spoken multimodal.videos.text_timestamps",
    "multimodal.processor_interface": """
        multimodal.prepared_video multimodal.processor multimodal.videos.items multimodal.videos.prepared_video""",
    "multimodal.qwen2_5_vl.window_packing": "multimodal.qwen2_5_vl.packing",
    "multimodal.qwen2_vl.model": "multimodal.qwen2_vl.tower multimodal.qwen2_vl.vision_tower",
    "multimodal.qwen2_vl.preprocessor_config": "multimodal.qwen2_vl.preprocessing",
    "multimodal.qwen2_vl.qwen2_and_qwen2_5_vision_config": """
        multimodal.qwen2_vl.config multimodal.qwen2_vl.geometry multimodal.qwen2_vl.patch_geometry""",
    "multimodal.qwen2_vl.qwen_vl_hf_config": "multimodal.qwen2_vl.config_fields multimodal.qwen2_vl.media_tokens",
    "multimodal.qwen2_vl.smart_resize": """
        multimodal.qwen2_vl.image_budget multimodal.qwen2_vl.needs multimodal.qwen2_vl.sizes""",
    "multimodal.qwen3_vl": "multimodal.deep multimodal.deepstack",
    "multimodal.qwen3_vl.config": """
        multimodal.deep.config multimodal.deepstack.config multimodal.near multimodal.position_interpolation""",
    "multimodal.qwen3_vl.family": "multimodal.qwen3_vl.qwen3_5_family",
    "multimodal.qwen3_vl.model": """
        multimodal.deep.tower multimodal.deepstack.deepstack_tower multimodal.qwen3_vl.deepstack_tower""",
    "multimodal.qwen3_vl.processor": "multimodal.qwen3_vl.pictures",
    "multimodal.sources.http_fetch": """
        multimodal.sources.addresses multimodal.sources.fetch multimodal.sources.url_rules""",
    "multimodal.sources.media_loader": "multimodal.sources.loader",
    "multimodal.videos.frame_sampling": """
        multimodal.videos.clips multimodal.videos.frame_limits multimodal.videos.hf_frame_sampling
        multimodal.videos.sampling""",
    "multimodal.videos.video_file": "multimodal.videos.animation multimodal.videos.file",
    "multimodal.videos.video_frontend": "multimodal.videos.frontend",
    "multimodal.videos.video_job": "multimodal.videos.jobs",
    "multimodal.vit": "multimodal.tiles",
    "multimodal.vit.tile_image_processor": "multimodal.tiles.processor multimodal.vit.processor",
    "multimodal.vit.tile_vision_config": "multimodal.tiles.config multimodal.vit.config",
    "multimodal.vit.tile_vision_model": "multimodal.tiles.model multimodal.vit.model",
    "multimodal.vit.vision_language_config": """
        multimodal.hf_text_config multimodal.texts multimodal.tiles.fields multimodal.vit.hf_vision_config""",
    "multimodal.vit.vit_block": "multimodal.vit_block",
    "multimodal.vit.vit_config": "multimodal.vit multimodal.vit.base_config multimodal.vit.vit_sizes",
    "server.text.incremental_parser": "server.text.incremental",
    "server.tools.json_tool_parsers": "server.tools.hermes server.tools.llama3 server.tools.mistral",
    "server.tools.parser_registry": """
        server.tools.forms server.tools.reasoning_format_registry server.tools.reasoning_parser_registry
        server.tools.tool_parser_registry""",
    "server.tools.pythonic_tool_parser": "server.tools.pythonic",
    "server.tools.qwen3_tool_parser": "server.tools.qwen3 server.tools.qwen3_values",
    "server.tools.reasoning_parser": "server.reasoning.forms server.reasoning.parser",
    "server.tools.tool_parser": "server.tools.parser",
}
"""Current modules, without ``trencadis.`` -> their former names."""

MODULES = {old: new for new, olds in _FORMER_MODULES.items() for old in olds.split()}
"""Former modules, without ``trencadis.`` -> their current names."""

_MOVED = {
    "core.buckets": {
        "core.bucket_lookup": "BucketTable Plan escape",
        "core.device_shape_policy": """
            AxisRule DecodedPieces Density GraphMemory InputSizes LARGEST Policy SMALLEST capturable""",
    },
    "core.layout core.shared_constants": {
        "core.buckets": "align_up",
        "core.kv_cache_format": "RESERVED_BLOCKS SINK_BLOCK ZERO_BLOCK",
        "core.media_spans": "RESERVED_ROWS SINK_ROW ZERO_ROW",
        "core.vision_config": "WINDOW_SLOTS",
    },
    "core.models.attention": {
        "core.models.rotary_embedding": """
            HeadSpan PartialRotarySource TextRotary inverse_frequencies local_frequencies long_frequencies
            scale_frequencies scale_llama3 scale_yarn text_frequencies vision_frequencies""",
    },
    "core.step": {
        "core.launch_inputs": "HeadInputs PoolInputs ResetInputs StepInputs VisionInputs",
        "core.step_output": "HeadOutput PoolOutput Pooled StepOutput StepStats TargetScores append_pooled",
    },
}
"""Modules that some names have left -> current modules -> these names."""

MOVED = {
    f"{old}.{name}": new
    for olds, parts in _MOVED.items()
    for old in olds.split()
    for new, names in parts.items()
    for name in names.split()
}
"""Names with their former modules -> the modules that have them now."""

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
    "RecomputedModel": "CpuReferenceModel",
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

_MEMBERS = {
    "Attention": "turned=rotary_dim form=kv_format",
    "CrossAttention": "stored=compute_arena_rows",
    "CrossAttentionOps": "attend_pictures=cross_attend attend_rows=cross_attend_rows",
    "FixedPointPatchEmbed": "values=normalise_pixels",
    "HermesToolParser": "grammar=parse call=call_rule walls=stop_marks",
    "ImageGeometry": "prepared=make_prepared",
    "ImageNeeds": "pictures=images",
    "IncrementalParser": """
        grammar=parse ahead=peek sees=match_literal takes=take_literal until=read_until run_of=read_run
        _taken=_take_events""",
    "KeepingOps": "loaded=finish_loading",
    "LayerScaleBlock": "of_attention=attention_scale of_mlp=mlp_scale",
    "Linear": "pack_apart=pack_separately",
    "Memory": "backed=real_kv_bytes",
    "ModelConfig": """
        aligned=alignment_unit placed=placeholder_token placed_token=template_token own_towers=encoder_data_parallel
        sees=encodes_images""",
    "PartialRotarySource": "quantised=take_quantised stacked=take_stacked",
    "PlaceholderRun": "shown=visible_rows",
    "Pooler": "load_words=load_label_tokens",
    "Processor": "sizes=compute_geometry",
    "ReasoningFormat": "parser=make_parser state=find_state",
    "RowParallelLinear": "summed=reduce",
    "TextConfig": "place=norm_placement turned=rotary_dim joined=bidirectional_images cross=cross_attention_layers",
    "TextRotary": "far=long_axis",
    "TilePatchEmbed": "table=position_table colours=scale_shift values=normalise_pixels",
    "TileProjector": "enter=linear_1 leave=linear_2",
    "TileVisionConfig": """
        crossing=cut_widths real=real_slots tile=slots_per_tile most_tiles=max_tiles places=patch_positions
        tokens=rows_per_tile exit_matrices=projector_matrices beside=other_weights out=attention_out""",
    "TileVisionModel": """
        see=patch_embed tell=projector places=load_position_table constant_rows=load_constant_rows
        projected=project_cells""",
    "ToolParser": """
        collected=collect_value call=call_rule calls=calls_rule amid=free_text_rule say=add_content
        say_blanks=add_pending_blanks start=start_call argue=add_arguments end=end_call accepts=is_accepted_name
        content_until=read_content_until attempt=try_calls call_objects=read_call_objects
        call_object=read_call_object value=read_value composite=read_composite string=read_string word=read_word
        walls=stop_marks joint=call_separator""",
    "ViTBlock": "names=config qkv_at=qkv_prefix",
    "ViTConfig": """
        stored=count_weights held=count_rank_weights exit_matrices=projector_matrices beside=other_weights
        embedded=patch_embed_inputs filled=pads_to_unit planes=bytes_per_value layers_at=layer_prefix
        out=attention_out columns=mlp_in down=mlp_out norm=norm_weights""",
    "VideoProcessor": "frames=frame_limits",
    "WeightSource": "quantised=take_quantised stacked=take_stacked",
}
"""Current class name -> members (methods, attributes, constructor arguments) as ``former=current``."""

MEMBERS = {name: dict(pair.split("=") for pair in pairs.split()) for name, pairs in _MEMBERS.items()}
"""Current class name -> former names of its members -> current names."""


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
    if current := _find_module(inside):
        yield module, f"trencadis.{current}"
    for alias in statement.names if isinstance(statement, ast.ImportFrom) else ():
        if alias.name in NAMES:
            yield alias.name, NAMES[alias.name]
        elif f"{inside}.{alias.name}" in MOVED:
            yield f"{module}.{alias.name}", f"trencadis.{MOVED[f'{inside}.{alias.name}']}.{alias.name}"
        elif f"{inside}.{alias.name}" in MODULES:
            yield f"{module}.{alias.name}", f"trencadis.{MODULES[f'{inside}.{alias.name}']}"


def _find_module(former: str) -> str:
    """Returns the current name of a former module, also if only its folder was renamed; "" if there is none."""
    if former in MODULES:
        return MODULES[former]
    folder, _, name = former.rpartition(".")
    package = find_spec(f"trencadis.{MODULES[folder]}") if folder in MODULES else None
    if package is None or not package.submodule_search_locations:
        return ""
    current = f"{MODULES[folder]}.{name}"
    return current if find_spec(f"trencadis.{current}") is not None else ""


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
        elif inside in MOVED:
            yield f"{module}.{name}", f"trencadis.{MOVED[inside]}.{name}"
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
