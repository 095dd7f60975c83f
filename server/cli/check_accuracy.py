"""``trencadis check-accuracy``: asks a model questions with known answers, and transformers the same ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from trencadis.assets import demo_path
from trencadis.core import devices
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError, TrencadisError
from trencadis.core.process import torch_detection
from trencadis.core.request import SamplingParams
from trencadis.server.bench.accuracy_statistics import (
    AccuracyRun,
    ScoreRow,
    as_json,
    load_run,
    paired_difference,
    score_rows,
)
from trencadis.server.bench.drawn_accuracy_items import AccuracyItem, ItemMaker, find_languages
from trencadis.server.cli.subcommand_flag_parser import parse_options, print_help_if_asked
from trencadis.server.config import model_download
from trencadis.server.processes import signals_and_logging

USAGE = """\
usage: trencadis check-accuracy [MODEL] [--device NAME] [--items N] [--kinds K,...] [--sizes W,...] [--seed N]
                                [--reference transformers|none] [--save FILE] [--baseline FILE] [--json]

Draws images with known truth (numbers, words, counts, colours, places in words, as boxes and as points, two images
compared), asks this engine on the device and transformers on the CPU in float32, and prints both scores with their 95 %
confidence, by kind of item and by width of the image. MODEL is a folder or hub id; without one, the demo.
Exit code 0: the score is within chance of the reference's and the baseline's; 1: it is below one of them.

  --device NAME      as for serve (default auto)
  --items N          items in all (default 240)
  --kinds K,...      number, word, count, colour, place, box, point, compare (default: all)
  --sizes W,...      widths of the images in pixels; heights are three quarters of them (default 224,448)
  --seed N           of the items (default 0)
  --dtype TYPE       of the weights on the device, as for serve
  --reference NAME   transformers (the default) or none
  --save FILE        writes this engine's answers, for a later --baseline
  --baseline FILE    compares with the answers that an earlier release wrote with --save
  --json             the report as JSON
"""

VALUED = ("device", "items", "kinds", "sizes", "seed", "dtype", "reference", "save", "baseline")
LONGEST = 48
"""Tokens of an answer."""

MOST_ITEMS, MOST_PIXELS = 100_000, 8192


@dataclass(slots=True)
class AccuracyOptions:
    """The options of the command line."""

    model: str = ""
    device: str = "auto"
    items: int = 240
    kinds: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (224, 448)
    seed: int = 0
    dtype: str = ""
    reference: str = "transformers"
    save: str = ""
    baseline: str = ""
    as_json: bool = False


def main(words: Sequence[str]) -> int:
    """Runs the ``check-accuracy`` command; returns the exit code."""
    if print_help_if_asked(words, USAGE):
        return 0
    asked = parse(words)
    signals_and_logging.raise_early_stop()
    torch_detection.prepare_device_env(asked.device)
    torch_detection.import_torch()
    baseline = load_run(Path(asked.baseline), asked.seed) if asked.baseline else None
    folder = model_download.find_model_folder(EngineConfig(model=asked.model)) if asked.model else demo_path()
    if load_config(folder).vision is None:
        raise StartupError(f"check-accuracy asks about images, and {folder.name} has no vision tower.")
    asked_engine = _ask_engine(asked, folder)
    items, ours = asked_engine.items, asked_engine.run
    runs = [ours]
    if asked.reference == "transformers":
        runs.append(_ask_transformers(asked, folder, asked_engine))
    if asked.save:
        ours.save(Path(asked.save))
    if baseline is not None:
        runs.append(baseline)
    return _report(asked, items, runs)


def parse(words: Sequence[str]) -> AccuracyOptions:
    """Parses the words; raises a StartupError that names the first wrong one."""
    given = parse_options("check-accuracy", words, VALUED, ("json",), most_names=1)
    asked = AccuracyOptions("".join(given.names), as_json="json" in given.flags)
    for name, value in given.values.items():
        _set_option(asked, name, value)
    return asked


def _set_option(asked: AccuracyOptions, name: str, value: str) -> None:
    if name in ("items", "seed"):
        least, most = (1, MOST_ITEMS) if name == "items" else (0, 2**63 - 1)
        setattr(asked, name, _whole_number(name, value, least, most))
    elif name == "sizes":
        asked.sizes = tuple(_whole_number(name, one, 28, MOST_PIXELS) for one in value.split(","))
    elif name == "kinds":
        known = ItemMaker(0, (), ()).kinds
        asked.kinds = tuple(value.split(","))
        for kind in asked.kinds:
            if kind not in known:
                raise StartupError(f"--kinds {kind[:40]}: there are {', '.join(known)}.")
    elif name == "reference" and value not in ("transformers", "none"):
        raise StartupError(f"--reference {value[:40]}: it must be transformers or none.")
    else:
        setattr(asked, name, value)


def _whole_number(name: str, value: str, least: int, most: int) -> int:
    if not value.isdecimal() or not least <= int(value) <= most:
        raise StartupError(f"--{name} {value[:40]}: it must be a whole number from {least} to {most}.")
    return int(value)


class EngineAnswers(NamedTuple):
    """This engine's run over the items, the token ids of each prompt, and the tokenizer's ``decode``."""

    items: list[AccuracyItem]
    run: AccuracyRun
    prompts: list[list[int]]
    decode: Callable[[Sequence[int], bool], str]


def _ask_engine(asked: AccuracyOptions, folder: Path) -> EngineAnswers:
    from trencadis.llm import LLM

    llm = LLM(asked.model, limit_mm_per_prompt={"image": 2}, device=asked.device, dtype=asked.dtype or None)
    try:
        items = _make_items(asked, find_languages(llm.service.tokenizer))
        chats = [
            [{"role": "user", "content": [
                *({"type": "image", "image": scene.draw()} for scene in item.scenes),
                {"type": "text", "text": item.question},
            ]}]
            for item in items
        ]  # fmt: skip
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=LONGEST), use_tqdm=False)
        answers = {item.name: str(out.outputs[0].text) for item, out in zip(items, outputs, strict=True)}
        prompts = [list(out.prompt_token_ids) for out in outputs]
        label = f"trencadis on {llm.config.device}"
    except TrencadisError as error:
        raise StartupError(f"check-accuracy: {error}") from None
    finally:
        llm.close()
    return EngineAnswers(items, _make_run(asked, folder, label, items, answers), prompts, llm.service.tokenizer.decode)


def _make_items(asked: AccuracyOptions, languages: Sequence[str]) -> list[AccuracyItem]:
    maker = ItemMaker(asked.seed, asked.sizes, languages)
    kinds = [kind for kind in asked.kinds or maker.kinds if languages or kind != "word"]
    if not kinds:
        raise StartupError("--kinds word: the tokenizer has the words of no language; leave the flag out.")
    return maker.make(kinds, asked.items)


def _make_run(
    asked: AccuracyOptions, folder: Path, label: str, items: Sequence[AccuracyItem], answers: dict[str, str]
) -> AccuracyRun:
    right = {item.name: item.accepts(answers[item.name]) for item in items}
    return AccuracyRun(folder.name, label, asked.seed, right, answers)


def _ask_transformers(asked: AccuracyOptions, folder: Path, engine: EngineAnswers) -> AccuracyRun:
    """Returns the run of transformers over the same prompts."""
    result = import_module(f"{devices.CONFORMANCE}.check_result")
    module = import_module(f"{devices.CONFORMANCE}.check_model.transformers_oracle")
    config = load_config(folder)
    try:
        oracle = module.TransformersAnswers(folder, config.image_token, config.eos)
    except (result.Skipped, ImportError) as reason:
        raise StartupError(f"check-accuracy: {reason}; --reference none asks this engine alone.") from None
    answers = {}
    for item, prompt in zip(engine.items, engine.prompts, strict=True):
        made = oracle.answer(prompt, [scene.draw() for scene in item.scenes], LONGEST)
        answers[item.name] = engine.decode(made, True)
    return _make_run(asked, folder, "transformers", engine.items, answers)


def _report(asked: AccuracyOptions, items: Sequence[AccuracyItem], runs: Sequence[AccuracyRun]) -> int:
    """Prints the scores and what differs by more than chance; returns the exit code."""
    ours, labels = runs[0], [run.label for run in runs]
    rows = score_rows([(item.name, item.kind, item.size) for item in items], runs)
    verdicts, below = [], False
    for other in runs[1:]:
        found = paired_difference(ours.right, other.right)
        below = below or found.is_below
        how = "below" if found.is_below else "within chance of"
        verdicts.append(
            f"{how} {other.label}: {found.worse} items only it has right, {found.better} only this engine "
            f"(p = {found.chance:.2g})"
        )
    if asked.as_json:
        report = {"model": ours.model, "seed": asked.seed, "rows": as_json(rows, labels), "verdicts": verdicts}
        print(json.dumps({**report, "passed": not below}, indent=1, ensure_ascii=False))
    else:
        print_rows(rows, labels)
        print("\n".join(verdicts) or f"{ours.model}: {len(items)} items")
    return 1 if below else 0


def print_rows(rows: Sequence[ScoreRow], labels: Sequence[str]) -> None:
    """Prints a table of shares."""
    print(f"{'kind':<9}{'width':>6}{'items':>7}  " + "".join(f"{label:<26}" for label in labels).rstrip())
    for row in rows:
        shares = "".join(f"{share!s:<26}" for share in row.shares).rstrip()
        print(f"{row.kind:<9}{row.size or 'all':>6}{row.items:>7}  {shares}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
