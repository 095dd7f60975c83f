"""``trencadis plan``: plans the memory and shapes of a start-up without weights or device."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trencadis.core import devices
from trencadis.core.buckets import Stage, is_drafting
from trencadis.core.checkpoint import model_registry
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.pooling_config_reader import load_model_config
from trencadis.core.devices import likely, policy_of
from trencadis.core.engine.pipeline_startup_plan import planned_stages
from trencadis.core.engine.startup_checks import check_start
from trencadis.core.engine.startup_plan import DryRun, PlannedDevice, StartupPlan
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.executor.rank_info_and_fingerprint import check_size
from trencadis.core.host_memory import gib
from trencadis.core.json_types import JsonObject
from trencadis.core.memory import graph_measurement_cache
from trencadis.core.shapes import bucket_options as bucket_env
from trencadis.core.shapes.bucket_profile import read_profile, write_profile
from trencadis.core.shapes.pipeline_partition import split_model
from trencadis.core.spec.draft_checkpoint import find_drafter, sizes_of
from trencadis.multimodal.processor_interface import PROCESSOR_FILES
from trencadis.server.config import command_line_parser, model_download, value_parsers
from trencadis.server.config.resolve_settings import hide_keys, resolve_settings
from trencadis.server.plan import plan_report as plan_report
from trencadis.server.plan.plan_report import make_pipeline_report
from trencadis.server.plan.trace_plan_comparison import Sizes, StepNeeds

USAGE = """\
usage: trencadis plan [MODEL] --memory 96GiB [--device hpu|cuda|cpu] [--flag value ...]

Prints how a start-up would divide the memory of a device, which shapes it would plan and how long warm-up would take.
MODEL is a folder or hub id, of which only JSON files are read (default: the bundled demo). Takes the flags of serve.

  --memory SIZE      memory of one device, e.g. 96GiB (required)
  --others SIZE      memory that other programs hold (default 0)
  --nodes N          machines that the ranks are on, as many on each (default --nnodes), for what crosses between them
  --batch N          requests that decode at a time, for the time that pipeline stages wait (default --max-num-seqs)
  --json             everything as JSON
  --plot FILE.png    an image of the plan: every need, coloured by its padding (--trace adds traffic)
  --trace FILE       real and padded work of a traffic file (JSON lines; see docs), compared with other plans
  --report FILE.html the comparison as a page, with a drawing of every stage's needs and buckets; FILE.svg: these alone
  --save-profile FILE  writes the shapes that the --trace needs, for serve --bucket-profile; without --trace, those of
                     the profiles that --merge names
  --merge A,B        profiles of several servers, added up by --save-profile
  --rows-by-blocks   --plot: decode launches instead of prompts
  --time             what a decoding step takes at 1, 32 and 256 rows, and what limits it (cuda; needs torch and triton)
  --card NAME        --time: the card, e.g. A100, H100, H200, B200 (default H100)
"""

SIZED_OPTIONS = ("memory", "others")
COUNTED_OPTIONS = ("nodes", "batch")
FILE_OPTIONS = ("plot", "trace", "card", "save-profile", "merge", "report")


@dataclass(slots=True)
class PlanOptions:
    """The options of ``plan`` in addition to those of ``serve``."""

    memory: int = 0
    others: int = 0
    nodes: int = 1
    batch: int = 0
    plot: str = ""
    trace: str = ""
    card: str = ""
    report: str = ""
    save_profile: str = ""
    merge: str = ""
    time: bool = False
    as_json: bool = False
    by_blocks: bool = False


def main(words: Sequence[str]) -> int:
    """Runs the ``plan`` command; returns the exit code."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE, end="")
        return 0
    own, rest = _parse_options(words)
    begun = time.perf_counter()
    settings = resolve_settings(command_line_parser.parse(rest), os.environ)
    settings.notes.extend(hide_keys(settings))
    config = replace(settings.engine, learn_buckets="off")
    path = _find_model_folder(config)
    model = load_model_config(replace(config, model=str(path)))
    if model.vision is not None and any((path / name).is_file() for name in PROCESSOR_FILES):
        # Raises for options that the API process would refuse.
        model_registry.image_processor(model, config.mm_processor_kwargs, config.image_alignment)
    plans = make_stage_plans(config, model, own.memory, own.others)
    planned = plans[0]
    sizes = model_registry.image_sizes(model, config.mm_processor_kwargs, config.image_alignment)
    report = plan_report.make_report(planned, config, model, sizes)
    nodes = max(own.nodes, config.nnodes)
    if len(plans) > 1 or nodes > 1:
        report["pipeline"] = make_pipeline_report(plans, nodes, own.batch)
        report["notes"] += [note for p in plans[1:] for note in p.notes]
    taken = _group_bytes(config)
    told = [f"Collectives take {gib(taken)} of each card's memory, which is not planned."] if taken else []
    if sums := policy_of(likely(config.device), config.policy).sum_bytes(config.tensor_parallel_size):
        told += [f"Sums over ranks take {gib(sums)} of each card's memory, which counts as used by others."]
    report["notes"] = [*dict.fromkeys([*settings.notes, *report["notes"], *told])]
    report["seconds_to_plan"] = round(time.perf_counter() - begun, 3)
    if own.report and not own.trace:
        raise StartupError("--report needs --trace.")
    needs = _compare_on_trace(own, report, planned, model, sizes) if own.trace else []
    if own.save_profile:
        report["profile"] = _save_profile(own, needs, planned)
    if own.plot:
        from trencadis.server.plan import padding_plot  # needs Pillow

        padding_plot.draw(planned.plan, planned.limits, own.plot, own.by_blocks, needs)
        report["plot"] = own.plot
    lines: list[str] = []
    if own.time:
        timer = devices.timer(likely(config.device))
        verified = [b for b in planned.plan.buckets if b.stage is Stage.VERIFY and not is_drafting(b)]
        ends = verified[:1] + verified[1:][-1:]
        asked = config.attention_backend
        report["time"] = timer.times(model, config.tensor_parallel_size, own.card, verified=ends, attention=asked)
        lines = ["", *timer.lines(report["time"])]
    print(json.dumps(report, indent=1) if own.as_json else "\n".join([plan_report.format_report(report), *lines]))
    return 0


def _compare_on_trace(
    own: PlanOptions, report: JsonObject, planned: StartupPlan, model: ModelConfig, sizes: Sizes
) -> list[StepNeeds]:
    """Adds the comparison of plans on a trace to the report and, if asked for, draws its page; returns the needs."""
    from trencadis.server.plan import plan_comparison_page, trace_plan_comparison

    traffic = trace_plan_comparison.read_trace(own.trace, sizes)
    needs = trace_plan_comparison.replay_needs(traffic, planned)
    compared = trace_plan_comparison.list_compared_plans(needs, planned, model)
    found = trace_plan_comparison.compare_plans(needs, planned, model, compared)
    report["trace"] = {"requests": len(traffic), **found}
    if own.report:
        drawn = {name: one.plan for name, one in [*compared.items()][:2]}
        plan_comparison_page.write_page(
            own.report, report["trace"], trace_plan_comparison.record_needs(needs, planned.plan), drawn
        )
        report["page"] = own.report
    return needs


def _save_profile(own: PlanOptions, needs: Sequence[StepNeeds], planned: StartupPlan) -> str:
    """Writes the needs of the trace and of the profiles to merge; returns the file's path.

    Raises:
        StartupError: there is nothing to write, a profile is refused, or the file cannot be written.
    """
    from trencadis.server.plan.trace_plan_comparison import record_needs

    found = record_needs(needs, planned.plan)
    for path in own.merge.split(",") if own.merge else ():
        found.merge(read_profile(path.strip(), planned.plan.policy, planned.limits.block_size))
    if not found.cells:
        raise StartupError("--save-profile needs --trace, or --merge with profiles.")
    write_profile(own.save_profile, found, planned.limits.block_size)
    return own.save_profile


def _parse_options(words: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """Parses the options of ``plan``; returns them and the remaining words, which are flags of ``serve``."""
    own, rest, queue = PlanOptions(), [], list(words)
    while queue:
        word = queue.pop(0)
        written, sign, value = word.partition("=")
        name = written[2:].replace("_", "-") if written.startswith("--") else ""
        if name == "json":
            own.as_json = True
        elif name == "rows-by-blocks":
            own.by_blocks = True
        elif name == "time":
            own.time = True
        elif name in (*SIZED_OPTIONS, *FILE_OPTIONS, *COUNTED_OPTIONS):
            if not sign and not queue:
                raise StartupError(f"--{name} needs a value.")
            text = value if sign else queue.pop(0)
            setattr(own, name.replace("-", "_"), _parse_value(name, text))
        else:
            rest.append(word)
    if own.memory <= 0:
        raise StartupError(
            "plan needs the memory of one device, e.g. --memory 96GiB, because there is no device to ask."
        )
    return own, rest


def _parse_value(name: str, text: str) -> int | str:
    if name in SIZED_OPTIONS:
        return value_parsers.parse_size(text, f"--{name}")
    if name in FILE_OPTIONS:
        return text
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise StartupError(f"--{name} {text[:40]}: a whole number from 1 on is needed.")
    return int(text)


def _find_model_folder(config: EngineConfig) -> Path:
    """Returns the folder of the model; does not download weights."""
    if config.model:
        return model_download.resolve(config.model, config.revision, config.hf_token, config.download_dir, ("*.json",))
    from trencadis.assets import demo_path

    return Path(demo_path())


def _group_bytes(config: EngineConfig) -> int:
    """Returns the bytes that collectives take of each card before a start reads how much memory it has."""
    policy = policy_of(likely(config.device), config.policy)
    return policy.group_bytes if config.tensor_parallel_size * config.pipeline_parallel_size > 1 else 0


def make_plan(config: EngineConfig, model: ModelConfig, memory: int, others: int = 0) -> StartupPlan:
    """Plans the start-up of ``config`` on devices of ``memory`` bytes each; returns the first of several stages."""
    return make_stage_plans(config, model, memory, others)[0]


def make_stage_plans(config: EngineConfig, model: ModelConfig, memory: int, others: int = 0) -> tuple[StartupPlan, ...]:
    """Plans each pipeline stage of the start-up of ``config`` on devices of ``memory`` bytes each."""
    name = likely(config.device)
    policy = policy_of(name, config.policy)
    ranks = config.tensor_parallel_size
    check_size(model, ranks)
    parts = split_model(model, config.pipeline_parallel_size, config.pipeline_layer_partition)
    itemsize = 4 if config.dtype == "float32" or (config.dtype == "auto" and name == "cpu") else 2
    images = model_registry.image_needs(model, config.mm_processor_kwargs, config.image_alignment)
    used = others + policy.sum_bytes(ranks)
    device = PlannedDevice(name, memory - _group_bytes(config), used, ranks, itemsize)
    asked, starts = bucket_env.read_bucket_options(os.environ), []
    for part in parts:
        check_start(config, part, policy, name)
        drafter, block = find_drafter(config, part), config.block_size or policy.block_sizes[0]
        key = graph_measurement_cache.MeasurementKey(
            graph_measurement_cache.fingerprint(part, None if drafter is None else sizes_of(drafter)),
            name,
            f"{8 * itemsize} bit",
            ranks,
            block,
        )
        known = graph_measurement_cache.load_nearest(key, graph_measurement_cache.folder())
        starts.append(DryRun(config, part, policy, asked, images, device, known, draft=drafter))
    return planned_stages(starts)
