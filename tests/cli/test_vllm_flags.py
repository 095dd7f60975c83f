"""Every flag of vLLM's: it works, flags of ours do it, it has no effect and says so, or it is refused with a reason.

vllm_flags.csv has the flags of `vllm serve` 0.33 with kind and default as its help states them, vllm_flags_older.csv
those that scripts carry from versions before. The last column is what happens here at least: a flag that has become
one of ours works, whatever stands there.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.fakes.command_line import from_command_line
from tools.pages import reference_pages
from trencadis.core.errors import StartupError
from trencadis.server.config import help_formatter
from trencadis.server.config import vllm_flag_row_and_value_conversion as rows
from trencadis.server.config.flag_table_and_lookup import LISTS, WHOLE, Flag, find_flag, get_flag_table
from trencadis.server.config.resolve_settings import Settings
from trencadis.server.config.vllm_flag_and_env_table import EVERY, ROWS
from trencadis.server.config.vllm_flag_row_and_value_conversion import FlagRow

HERE = Path(__file__).parent
VERDICTS = {"free": rows.FREE, "means": rows.MEANS, "refused": rows.REFUSED}
PROMISE = re.compile(r"\byet\b|\bwill\b|\bsoon\b|\blater\b|\bplanned to\b|\bfuture\b", re.IGNORECASE)


class VllmFlag(NamedTuple):
    """A flag as vLLM has it, and its verdict here."""

    name: str
    kind: str
    default: str
    verdict: str

    @property
    def written(self) -> str:
        return f"--{self.name}"


def _read(name: str) -> list[VllmFlag]:
    with (HERE / name).open(newline="") as file:
        every = [VllmFlag(**line) for line in csv.DictReader(file)]
    return [flag._replace(verdict="works") if find_flag(flag.written).flag is not None else flag for flag in every]


FLAGS = [*_read("vllm_flags.csv"), *_read("vllm_flags_older.csv")]
PROBES = {"int": "7", "float": "0.25", "str": "/nowhere/x", "list": "x", "json": '{"x": 1}'}
"""Values that ask for something, by kind."""


def given(*words: str) -> Settings:
    return from_command_line([*words, "--seed", "5"], {})


def refusal(*words: str) -> str:
    with pytest.raises(StartupError) as caught:
        given(*words)
    return str(caught.value)


def asking(flag: VllmFlag, row: FlagRow) -> list[str]:
    """The flag with a value that asks for something."""
    if flag.kind == "bool":
        return [f"--no-{flag.name}" if row.neutral == (True,) else flag.written]
    return [flag.written, PROBES[flag.kind]]


def test_both_lists_are_whole() -> None:
    assert len(_read("vllm_flags.csv")) == 322 and len(_read("vllm_flags_older.csv")) == 46
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_has_its_verdict_and_takes_values_as_vllm_does(flag: VllmFlag) -> None:
    found = find_flag(flag.written)
    if flag.verdict == "works":
        assert found.flag is not None or flag.name in ("help", "config")
        return
    assert found.flag is None
    row = ROWS[found.name]
    assert (row.verdict, row.kind) == (VERDICTS[flag.verdict], flag.kind)


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.default], ids=lambda flag: flag.name)
def test_vllms_own_default_is_always_taken(flag: VllmFlag) -> None:
    value = [f"--no-{flag.name}" if flag.default == "false" else flag.written] if flag.kind == "bool" else None
    settings = given(*(value or [flag.written, flag.default]))
    assert settings.engine.seed == 5 and settings.engine.model == ""
    if flag.verdict == "refused":
        assert settings.notes == []


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.verdict == "refused"], ids=lambda flag: flag.name)
def test_what_would_change_something_is_refused_with_a_reason(flag: VllmFlag) -> None:
    row = ROWS[find_flag(flag.written).name]
    message = refusal(*asking(flag, row))
    assert message.startswith(row.written) and " is refused: " in message and message.endswith(".")
    assert "\n" not in message and len(message) < 260 and not PROMISE.search(message)
    if flag.kind in ("int", "float"):
        assert "is not a" in refusal(flag.written, "x")
    if flag.kind != "bool":
        assert given(flag.written, "none").notes == []


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.verdict == "free"], ids=lambda flag: flag.name)
def test_a_flag_without_effect_changes_nothing_and_says_why(flag: VllmFlag) -> None:
    row = ROWS[find_flag(flag.written).name]
    settings = given(*asking(flag, row))
    assert (settings.engine, settings.server) == (given().engine, given().server)
    assert len(settings.notes) == 1 and settings.notes[0].startswith(f"{row.written}") and row.why in settings.notes[0]
    assert not PROMISE.search(settings.notes[0])


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--disable-mm-preprocessor-cache", "mm_processor_cache_gb", 0.0),
        ("--async-scheduling", "async_depth", 1),
        ("--no-async-scheduling", "async_depth", 0),
        ("--language-model-only", "limit_mm_per_prompt", {"image": 0, "video": 0}),
        ("--max-num-active-seqs 3", "max_num_seqs", 3),
        ("--max-num-active-seqs 3 --max-num-seqs 2", "max_num_seqs", 2),
        ("--max-num-seqs 9 --max-num-active-seqs 3", "max_num_seqs", 3),
        ("--max-num-scheduled-tokens 64", "max_num_batched_tokens", 64),
        ("-O0", "enforce_eager", True),
        ("-O3", "enforce_eager", False),
        ("--optimization-level 0", "enforce_eager", True),
        ("--compilation-config.cudagraph_mode NONE", "enforce_eager", True),
        ("--compilation-config.cudagraph_mode FULL", "enforce_eager", False),
        ('-cc {"mode":3,"use_cudagraph":false}', "enforce_eager", True),
        ("-cc.cudagraph_mode=NONE", "enforce_eager", True),
        ("-O.use_cudagraph false", "enforce_eager", True),
        ('--media-io-kwargs {"video":{"num_frames":32,"fps":-1}}', "mm_processor_kwargs",
         {"videos_kwargs": {"num_frames": 32}}),
        ("--media-io-kwargs.video.fps 2", "mm_processor_kwargs", {"videos_kwargs": {"fps": 2}}),
        ("--logging-config.log_level warning", "log_level", "WARNING"),
        ("--logging-config.log_level warning --log-level error", "log_level", "ERROR"),
        ("--structured-outputs-config.reasoning_parser qwen3", "reasoning_parser", "qwen3"),
        ('--structured-outputs-config {"disable_any_whitespace":true}', "disable_any_whitespace", True),
        ("--structured-outputs-config.disable_additional_properties true", "disable_additional_properties", True),
        ("--reasoning-config.reasoning_parser deepseek_r1", "reasoning_parser", "deepseek_r1"),
        ('--reasoning-parser qwen3 --reasoning-config {"reasoning_start_str":"<think>","reasoning_end_str":"</think>"}',
         "reasoning_parser", "qwen3"),
        ("--no-disable-log-requests", "enable_log_requests", True),
        ("--disable-access-log-for-endpoints /health,/metrics", "disable_access_log_for_endpoints",
         ["/health", "/metrics"]),
        ("--load-format runai_streamer", "load_format", "safetensors"),
        ("--guided-decoding-disable-any-whitespace", "disable_any_whitespace", True),
        ("--hf-token", "hf_token", ""),
    ],
)  # fmt: skip
def test_a_flag_that_ours_replace_does_what_it_says(line: str, name: str, value: object, tmp_path: Path) -> None:
    settings = given(*line.split())
    assert getattr(settings.engine, name, None) == value or getattr(settings.server, name, None) == value
    assert [note for note in settings.notes if "-config.mode" not in note] == []


def test_a_file_means_the_same(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "compilation-config: {cudagraph_mode: NONE, mode: 3}\nasync-scheduling: false\nmax-num-active-seqs: 3\n"
        "swap-space: 16\nlora-target-modules: null\nno-enable-dbo: true\nmax-num-seqs: 5\n"
    )
    settings = from_command_line(["--config", str(file)], {})
    engine = settings.engine
    assert (engine.enforce_eager, engine.async_depth, engine.max_num_seqs) == (True, 0, 3)
    assert [note.partition(" has")[0] for note in settings.notes] == ["--compilation-config.mode", "--swap-space"]
    assert settings.sources["max_num_seqs"] == f"file {file}"
    file.write_text("prefill-context-parallel-size: 2\n")
    assert refusal("--config", str(file)).startswith(f"--config {file}: --prefill-context-parallel-size 2 is refused: ")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--prefill-context-parallel-size", "--prefill-context-parallel-size needs a value."),
        ("--prefill-context-parallel-size two", "--prefill-context-parallel-size: 'two' is not a whole number."),
        ("--no-enable-lora=1", "--no-enable-lora takes no value."),
        ("--enable-lora=2", "--enable-lora='2' is neither true"),
        ("--speculative-config {", "--speculative-config: '{' is not a JSON object"),
        ("--speculative-config.method ngrm", "--speculative-config: method: 'ngrm' is none of ngram, suffix"),
        (
            "--structured-outputs-config.enable_in_reasoning true",
            "--structured-outputs-config.enable-in-reasoning is",
        ),
        ("--structured-outputs-config.nonsense 1", "--structured-outputs-config.nonsense 1 is refused"),
        (
            "--reasoning-config.reasoning_end_str Enough.</think>",
            "--reasoning-config.reasoning-end-str Enough.</think> is refused",
        ),
        ("--media-io-kwargs.video.backend x", "--media-io-kwargs.video.backend is refused"),
        ("--lora-target-modules a b", "--lora-target-modules a b is refused"),
        ("--max-lora-rank.x 1", "--max-lora-rank.x: --max-lora-rank takes no keys."),
        ("--enable-lo", "--enable-lo is ambiguous: "),
    ],
)
def test_values_are_read_as_vllm_reads_them(line: str, says: str) -> None:
    assert says in refusal(*line.split())


OF_OTHERS = ("--cpunodebind", "--membind", "--physcpubind")
"""Flags of numactl."""


def other_value(flag: Flag) -> str:
    """A text whose value is not the default."""
    if flag.name in ("speculative_config", "spec_model"):
        return '{"method": "suffix"}' if flag.kind == "json" else "[ngram]"
    if flag.choices:
        return next(one for one in flag.choices if one and one != flag.default)
    if flag.bound is not None:
        low, high = flag.bound.least, flag.bound.most
        step = 1 if flag.kind in WHOLE else (min(high, 2.0) - low) / 4
        some = (low + step * i for i in range(1, 5))
        return next(f"{v:g}" for v in some if flag.bound.holds(v) and v != flag.default)
    if flag.name == "reasoning_effort_map":
        return '{"low": "high"}'
    return {"json": '{"fps": 1}', "limits": "image=3"}.get(flag.kind, "/some/x")


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.verdict == "works"], ids=lambda flag: flag.name)
def test_a_flag_that_works_changes_the_configuration(flag: VllmFlag) -> None:
    found = find_flag(flag.written)
    if found.flag is None:
        assert found.name in ("help", "config")
        return
    own, words = found.flag, [flag.written]
    if len(own.choices) == 1:
        assert own.later and all("is refused" in refusal(flag.written, value) for value in own.later)
        return
    if own.kind == "bool":
        words = [f"--no-{own.name}" if own.default else own.written]
    else:
        words.append(other_value(own))
    if own.name in ("ssl_keyfile", "ssl_cert_reqs"):
        words += ["--ssl-certfile", "x"]
    if own.name == "seed":
        words = [own.written, "11"]
    if own.name in ("lora_modules", "default_mm_loras"):
        words.append("--enable-lora")
    settings = from_command_line(words, {})
    changed: Any = getattr(settings.engine if own.owner == "engine" else settings.server, own.name)
    assert changed != own.default and settings.sources[own.name] == "flag"


def test_rows_are_one_a_name_and_promise_nothing() -> None:
    names = [row.name for row in EVERY]
    own = {name for flag in get_flag_table().values() for name in (flag.name, *flag.aliases)}
    assert len(set(names)) == len(names)
    assert not set(names) & own, "these are flags of ours now: delete their rows"
    for row in EVERY:
        assert row.why and not row.why.endswith(".") and not PROMISE.search(row.why), row.name
        assert row.kind in ("bool", "int", "float", "str", "json", *LISTS), row.name
        for flag in re.findall(r"--[a-z][a-z-]+", row.why):
            assert flag in OF_OTHERS or find_flag(flag).flag is not None or flag == "--no-async-scheduling", flag


def test_no_value_of_ours_promises_anything() -> None:
    for flag in get_flag_table().values():
        assert not [why for why in flag.later.values() if PROMISE.search(why)], flag.name


def misspellings(name: str) -> list[str]:
    """A letter left out, doubled, or changed with its neighbour, in the middle of each word."""
    made, words = [], name.split("_")
    for i, word in enumerate(words):
        at = len(word) // 2
        if len(word) > 3:
            for other in (
                word[:at] + word[at + 1 :],
                word[:at] + word[at] + word[at:],
                word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :],
            ):
                made.append("_".join([*words[:i], other, *words[i + 1 :]]))
    return made


def meant(written: str) -> str:
    """The flag that a written name is taken for, or that the line about it asks after; "" if there is none."""
    try:
        return find_flag(f"--{written}").name
    except StartupError as error:
        requested = re.search(r"did you mean --(?:no-)?([\w-]+)\?", str(error))
        return requested[1].replace("-", "_") if requested else ""


def check_misspellings(names: list[str]) -> None:
    for name in names:
        for written in misspellings(name):
            assert meant(written) in ("", name), written


def test_a_misspelling_is_never_taken_for_another_flag() -> None:
    check_misspellings(sorted({*get_flag_table(), *ROWS})[::25])


@pytest.mark.long
def test_no_misspelling_of_any_flag_is_taken_for_another() -> None:
    check_misspellings(sorted({*get_flag_table(), *ROWS}))


def test_help_and_the_page_have_every_row() -> None:
    page, legacy = reference_pages.make_vllm_flags_section(), help_formatter.make_help_text("legacy")
    for row in EVERY:
        assert f"`{row.written}`" in page and row.written in legacy
    assert help_formatter.make_help_text("swap-space").startswith("--swap-space has no effect here: ")
    assert "--tensor-parallel-size" in help_formatter.make_help_text("prefill-context-parallel-size")
    docs = (HERE.parent.parent / "docs" / "migrating-from-vllm.md").read_text(encoding="utf-8")
    assert page in docs and docs == reference_pages.make_migration_page(docs), "run tools/gen_flags.py"
