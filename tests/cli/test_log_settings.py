"""Logs as an operator sets them: DEBUG lines, a dictConfig, and a line for each flag that does nothing."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.command_line import from_command_line
from tests.oracles.shadow_engine import ScheduleDriver, shadow_engine
from trencadis.core.buckets import Bucket, Stage
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.process import log_setup
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.step_builder_and_adapter_slots import log_launches
from trencadis.core.step_output import StepStats
from trencadis.server.config.model_download import resolve
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http.request_middleware import describe_missing_path
from trencadis.server.processes.signals_and_logging import set_up_logging

NAMES = ("", "trencadis", "trencadis.engine", "trencadis.server", "uvicorn", "uvicorn.access", "vllm")


@pytest.fixture
def kept_loggers() -> Iterator[None]:
    """Puts the loggers back as they were."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(one.level, [*one.handlers], [*one.filters], one.propagate, one.disabled) for one in loggers]
    yield
    for one, (level, handlers, filters, propagate, disabled) in zip(loggers, before, strict=True):
        one.setLevel(level)
        one.handlers[:], one.filters[:], one.propagate, one.disabled = handlers, filters, propagate, disabled


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--trust-remote-code"], "--trust-remote-code has no effect"),
        (["--show-hidden-metrics-for-version", "0.31"], "--show-hidden-metrics-for-version shows all"),
        (["--tokenizer-pool-type", "ray"], "--tokenizer-pool-type has no effect"),
        (["--tokenizer-pool-size", "4"], "--tokenizer-pool-size has no effect"),
    ],
)
def test_a_flag_that_does_nothing_prints_a_line(words: list[str], line: str) -> None:
    (note,) = from_command_line(words, {}).notes
    assert note.startswith(line)
    assert from_command_line(["--no-trust-remote-code"], {}).notes == []


def run_engine(blocks: int) -> None:
    """Eight requests, of which four repeat a prompt, with that many KV blocks."""
    engine, _ = shadow_engine(blocks=blocks, size=4, rows=20, depth=0, seqs=4)
    driver = ScheduleDriver(engine, random.Random(1), 96)
    for number in range(8):
        prompt = [5 + number % 4] * 17
        params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, seed=1)
        driver.add(Request(f"r{number}", prompt, params))
    driver.finish()


def test_debug_says_what_the_scheduler_decides(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "trencadis"):
        run_engine(30)
    said = caplog.text
    for line in ("admission: request r0 choice 0 starts with 17 tokens", "cache hit: request r",
                 "preemption: request r", "eviction: step "):  # fmt: skip
        assert line in said, line
    assert len([r for r in caplog.records if r.getMessage().startswith("preemption")]) >= 1
    with caplog.at_level(logging.DEBUG, "trencadis"):
        log_launches(7, [StepStats(Bucket(Stage.VISION, (64,)), 40, 64, "REPLAY", 0.002, True, "")])
    assert "launch: step 7 " in caplog.text and "40 of 64, 2.00 ms" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "trencadis"):
        run_engine(30)
    assert not caplog.records


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def set_up(path: Path | str) -> None:
    set_up_logging(EngineConfig(log_config_file=str(path)), ServerConfig())


def test_a_dict_config_has_the_last_word(tmp_path: Path, kept_loggers: None) -> None:
    out = tmp_path / "out.log"
    handler = {"class": "logging.FileHandler", "filename": str(out), "formatter": "theirs"}
    config = {
        "version": 1,
        "formatters": {"theirs": {"class": "vllm.logging_utils.NewLineFormatter", "format": "SAID %(message)s"}},
        "handlers": {"file": handler},
        "loggers": {"vllm": {"handlers": ["file"], "level": "DEBUG", "propagate": False}},
    }
    set_up(write(tmp_path / "logs.json", config))
    logging.getLogger("trencadis.server").debug("hello")
    assert out.read_text() == "SAID hello\n"
    for handler_of in logging.getLogger("trencadis").handlers:
        handler_of.close()


def test_flag_and_variable_name_the_same_file() -> None:
    assert from_command_line(["--log-config-file", "a.json"], {}).engine.log_config_file == "a.json"
    assert from_command_line([], {"VLLM_LOGGING_CONFIG_PATH": "b.json"}).engine.log_config_file == "b.json"
    assert not from_command_line([], {"VLLM_LOGGING_CONFIG_PATH": "b.json"}).notes
    given = '{"pylogging_config_file": "c.json"}'
    assert from_command_line(["--logging-config", given], {}).engine.log_config_file == "c.json"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "no such file"), ("{", "Expecting property name"), ([], "not a JSON object"), ({}, "version"),
        ({"version": 1, "handlers": {"a": {"class": "no.such.Handler"}}}, "no"), ("[" * 100_000, "recursion"),
        ({"version": 1, "loggers": {"x": {"level": "LOUD"}}}, "LOUD"), ({"version": 1, "handlers": 5}, "int"),
        ({"version": 1, "root": {"handlers": ["none"]}}, "none"),
    ],
)  # fmt: skip
def test_a_broken_dict_config_is_one_line(tmp_path: Path, content: Any, line: str, kept_loggers: None) -> None:
    path = tmp_path / "logs.json"
    if content is not None:
        write(path, content)
    with pytest.raises(StartupError) as refused:
        set_up(path)
    said = str(refused.value)
    assert line in said and said.startswith("--log-config-file ") and "dictConfig" in said and "\n" not in said


def test_a_special_file_is_no_config(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartupError, match="no such file"):
        log_setup.apply_config_file(str(tmp_path / "pipe"))


def test_routes_of_adapters_and_gguf_files_name_what_would_serve(tmp_path: Path) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in describe_missing_path(path)
    assert from_command_line([], {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}).server.allow_runtime_lora_updating
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartupError, match="is a GGUF file; take the safetensors checkpoint"):
        resolve(str(tmp_path / "model.gguf"))
