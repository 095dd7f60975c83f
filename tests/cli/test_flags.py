"""Each rule of the command line, the file, the environment and the dump."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trencadis
from tests.fakes.command_line import from_command_line
from tools.pages import reference_pages
from trencadis.core import envs
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.server.cli import main as cli
from trencadis.server.config import help_formatter, resolve_settings, value_parsers
from trencadis.server.config.flag_table_and_lookup import get_flag_table, get_flag_variables
from trencadis.server.config.server_config import ServerConfig

GUIDE = (
    "--port 8080 --model M --tensor-parallel-size 1 --max-num-seqs 128 --dtype bfloat16 --gpu-memory-util 0.9 "
    "--max-num-batched-tokens 32768 --max-model-len 32768 --block-size 128"
)


def settings(line="", environ=None):
    return from_command_line(line.split() if isinstance(line, str) else line, environ or {})


def refused(line, environ=None):
    with pytest.raises(StartupError) as caught:
        settings(line, environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_no_flag_is_all_defaults():
    s = settings()
    assert (s.engine, s.server, s.notes, s.sources) == (EngineConfig(), ServerConfig(), [], {})


def test_the_gaudi_guides_line():
    s = settings(GUIDE)
    e = s.engine
    assert (s.server.port, e.model, e.tensor_parallel_size, e.max_num_seqs, e.dtype) == (8080, "M", 1, 128, "bfloat16")
    assert (e.gpu_memory_utilization, e.max_num_batched_tokens, e.max_model_len, e.block_size) == (
        0.9,
        32768,
        32768,
        128,
    )
    assert not s.notes


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--max-model-len 1k", "max_model_len", 1000),
        ("--max_model_len=1K", "max_model_len", 1024),
        ("--max-model-len 25.6k", "max_model_len", 25600),
        ("--max-model-len auto", "max_model_len", None),
        ("--max-model-len -1", "max_model_len", None),
        ("--kv-cache-memory-bytes 256MiB", "kv_cache_memory_bytes", 256 << 20),
        ("--kv-cache-memory-bytes 1GB", "kv_cache_memory_bytes", 10**9),
        ("--kv-cache-memory-bytes 1G", "kv_cache_memory_bytes", 1 << 30),
        ("--gpu-memory-util .5", "gpu_memory_utilization", 0.5),
        ("--device-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
        ("-tp 1", "tensor_parallel_size", 1),
        ("--tp=1", "tensor_parallel_size", 1),
        ("--seed -5", "seed", -5),
        ("--enforce-eager", "enforce_eager", True),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--no_enable_prefix", "enable_prefix_caching", False),
        ("--skip-capt x", "skip_captures", ["x"]),
        ("--enable-prefix-caching=false", "enable_prefix_caching", False),
        ("--enforce-eager true", "enforce_eager", True),
        ("--dtype half", "dtype", "float16"),
        ("--dtype float", "dtype", "float32"),
        ("--limit-mm-per-prompt image=4", "limit_mm_per_prompt", {"image": 4}),
        ("--limit-mm-per-prompt image=4,video=1", "limit_mm_per_prompt", {"image": 4, "video": 1}),
        (["--limit-mm-per-prompt", '{"image": 4}'], "limit_mm_per_prompt", {"image": 4}),
        (["--limit-mm-per-prompt", '{"image": {"count": 4}}'], "limit_mm_per_prompt", {"image": 4}),
        ("--limit-mm-per-prompt.image 4", "limit_mm_per_prompt", {"image": 4}),
        ("--mm-processor-kwargs.min_pixels=3136 --mm_processor_kwargs.max_pixels 9", "mm_processor_kwargs",
         {"min_pixels": 3136, "max_pixels": 9}),
        ("--override-generation-config.a.b 0.5 --override-generation-config.c+ x --override-generation-config.c+ 2",
         "override_generation_config", {"a": {"b": 0.5}, "c": ["x", 2]}),
        ("some/model --port 1", "model", "some/model"),
        ("--model a b", "model", "b"),
        ("--enforce-eager m", "model", "m"),
        ("-- m", "model", "m"),
    ],
)  # fmt: skip
def test_engine_values(line, name, value):
    assert getattr(settings(line).engine, name) == value


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--api-key a b --port 1", "api_key", ["a", "b"]),
        ("--api-key a --api-key=b", "api_key", ["a", "b"]),
        (["--allowed-origins", '["*", "http://a"]'], "allowed_origins", ["*", "http://a"]),
        ("--served-model-name x y", "served_model_name", ["x", "y"]),
        ("--max-body-bytes 1MiB", "max_body_bytes", 1 << 20),
        ("--max-num-queued-reqs 1k", "max_num_queued_reqs", 1000),
        ("--shutdown-timeout 0", "shutdown_timeout", 0.0),
    ],
)
def test_server_values(line, name, value):
    assert getattr(settings(line).server, name) == value


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("--max-modle-len 1", "unknown flag --max-modle-len; did you mean --max-model-len?"),
        ("--zzzzzzzzz", "unknown flag --zzzzzzzzz; see --help."),
        ("--max-num 1", "--max-num is ambiguous: --max-num-batched-tokens, "),
        ("--port", "--port needs a value."),
        ("--port --host x", "--port needs a value."),
        ("--port x", "--port: 'x' is not a whole number."),
        ("--port 70000", "--port must be in [0, 65535]"),
        ("--max-model-len 1.5", "not a whole number"),
        ("--max-model-len 0", "--max-model-len must be positive, got 0."),
        ("--dtype bf16", "did you mean bfloat16"),
        ("--kv-cache-dtype int3", "is not one of auto"),
        ("--gpu-memory-util 1.5", "(0, 1]"),
        ("--gpu-memory-util nan", "is not a number"),
        ("--limit-mm-per-prompt image", "neither image=4 nor"),
        ("--limit-mm-per-prompt image=-1", "image=-1 is not a count"),
        ("--mm-processor-kwargs [1]", "is not a JSON object"),
        ("--port.x 1", "takes no keys"),
        ("--no-enforce-eager=1", "takes no value"),
        ("a b", "serve takes one model, but 2 were named: a, b."),
        ("--tensor-parallel-size 0", "tensor-parallel-size"),
        ("--ssl-keyfile k", "needs --ssl-certfile"),
        ("--quantization bitsandbytes", "--quantization bitsandbytes is refused: such quantised weights"),
        ("-q gguf", "is refused"),
        ("-q int2", "is not one of"),
        ("--distributed-executor-backend foo", "is not one of mp, uni, external_launcher, ray"),
        ("--enable-lora-bias", "adapters have no biases"),
        ("--lora-modules a=b", "--lora-modules needs --enable-lora"),
        ("--enable-lora --max-lora-rank 513", "must be in [1, 512]"),
        (["--speculative-config", '{"method": "medusa"}'], "medusa is not built; methods: ngram, suffix"),
        ("-pp 0", "pipeline-parallel-size"),
        ("--tool-parser-plugin p.py", "entry point trencadis.tool_parsers"),
        ("--kv-cache-dtype nvfp4", "--kv-cache-dtype nvfp4 is refused"),
        ("--kv-cache-scales static", "is not one of dynamic, checkpoint"),
        ("--config x.json", "must end in .yaml or .yml"),
        ("--config /no/such.yaml", "No such file"),
        ("--config a.yaml --config b.yaml", "only one --config"),
    ],
)
def test_refusals_are_one_line(line, part):
    assert part in refused(line)


@pytest.mark.parametrize("line", ["-pp 1", "--quantization none", "--no-enable-lora", "--kv-cache-dtype auto"])
def test_neutral_values_of_later_flags(line):
    assert settings(line).notes == []


@pytest.mark.parametrize(
    "line",
    ["--collect-detailed-traces all", "--num-scheduler-steps=8", "--performance-mode x",
     "--max_parallel_loading_workers 1", "--use-v2-block-manager", "--disable-custom-all-reduce", "-cc.mode 3",
     "--compilation-config 3", "--cudagraph-capture-sizes 1 2 4"],
)  # fmt: skip
def test_legacy_flags_warn_once_and_eat_their_values(line):
    s = settings(line + " --port 5")
    assert len(s.notes) == 1 and re.match(r"--[\w.-]+ has no effect: .+\.$", s.notes[0])
    assert s.server.port == 5 and s.engine.model == ""


def test_precedence_and_sources(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: from-file\nmax-model-len: 4k\nport: 9\nenforce_eager: true\nno-enable-chunked-prefill: true\n"
        "api-key: [k1, k2]\nlimit-mm-per-prompt: {image: 2}\nnum-lookahead-slots: 4\nseed: 3\n"
    )
    environ = {"VLLM_API_KEY": "env", "VLLM_LOGGING_LEVEL": "debug", "HF_TOKEN": "t"}
    s = settings(f"--config {file} --port 7 from-line", environ)
    assert (s.engine.model, s.engine.max_model_len, s.server.port) == ("from-line", 4000, 7)
    assert s.engine.enforce_eager and not s.engine.enable_chunked_prefill and s.engine.log_level == "DEBUG"
    assert s.server.api_key == ["k1", "k2"] and s.engine.limit_mm_per_prompt == {"image": 2} and s.engine.seed == 3
    assert s.notes == ["--num-lookahead-slots has no effect: a step takes the KV blocks that its guesses need."]
    assert s.sources["port"] == "flag" and s.sources["seed"] == f"file {file}"
    assert s.sources["log_level"] == "environment VLLM_LOGGING_LEVEL"
    assert settings("", {"VLLM_API_KEY": "env"}).server.api_key == ["env"]


def test_an_empty_key_or_name_stops_the_start(tmp_path):
    """Scripts write ``--api-key "$KEY"``; where KEY is unset the server must not be open without a word."""
    file = tmp_path / "c.yaml"
    file.write_text("api-key: ''\n")
    for words in (["--api-key", ""], ["--api-key", "a", " "], ["--api-key="], ["--config", str(file)]):
        assert "--api-key: a key is empty, which guards nothing" in refused(words)
    assert "--served-model-name: a name is empty" in refused(["--served-model-name", ""])
    assert settings("", {"VLLM_API_KEY": ""}).server.api_key == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("max-modle-len: 5", "did you mean --max-model-len?"),
        ("max-model-len: true", "does not fit --max-model-len"),
        ("max-model-len: [1]", "does not fit"),
        ("enforce-eager: 3", "does not fit"),
        ("dtype: bf17", "is not one of"),
        ("enable-lora-bias: true", "is refused"),
        ("- 1", "must be a mapping from names to values"),
        ("a: [", "not valid YAML"),
        ("config: x", "is not allowed in a file"),
    ],
)
def test_refused_files(tmp_path, content, part):
    (tmp_path / "c.yml").write_text(content)
    message = refused(f"--config {tmp_path}/c.yml")
    assert part in message and "c.yml" in message


def test_the_dump_names_sources_and_masks_secrets():
    s = settings("--api-key hush --max-num-seqs 9 --hf-token hush2", {"VLLM_LOGGING_LEVEL": "ERROR"})
    assert list(resolve_settings.format_startup_lines(s)) == [
        "api_key = **** (flag)",
        "hf_token = **** (flag)",
        "max_num_seqs = 9 (flag)",
        "log_level = 'ERROR' (environment VLLM_LOGGING_LEVEL)",
    ]
    assert {f.name for f in get_flag_table().values() if f.secret} == {"api_key", "hf_token"}


@pytest.mark.parametrize("text", ["true", "T", "1", "yes", "Y", "on"])
def test_true(text):
    assert envs.parse_bool(text, "X") and not envs.parse_bool("", "X")


@pytest.mark.parametrize("text", ["false", "f", "0", "No", "n", "OFF"])
def test_false(text):
    assert not envs.parse_bool(text, "X")


def test_environment_rules():
    assert "VLLM_SKIP_WARMUP='maybe' is neither true" in refused("", {"VLLM_SKIP_WARMUP": "maybe"})
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" in refused("", {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "x"})
    assert "VLLM_LOGGING_LEVEL" in refused("", {"VLLM_LOGGING_LEVEL": "LOUD"})
    lines = settings(
        "", {"VLLM_SKIP_WARMUP": "true", "VLLM_CONTIGUOUS_PA": "1", "VLLM_API_KEYS": "k", "TRENCADIS_X": ""}
    )
    assert [note.split(" ")[0] for note in lines.notes] == [
        "TRENCADIS_X", "VLLM_API_KEYS", "VLLM_CONTIGUOUS_PA",
    ]  # fmt: skip
    assert lines.engine.warmup == "skip" and lines.sources["warmup"] == "environment VLLM_SKIP_WARMUP"
    assert settings("--warmup full", {"VLLM_SKIP_WARMUP": "true"}).engine.warmup == "full"
    assert "--warmup-stall must be in [0, 1], got 2." in refused("--warmup-stall 2", {})
    assert "did you mean VLLM_API_KEY?" in lines.notes[1]


def test_no_variable_is_defined_twice():
    named = [name for flag in get_flag_table().values() for name in flag.env] + [env.name for env in envs.TABLE]
    assert len(named) == len(set(named))
    assert all(envs.secret(name) == flag.secret for name, flag in get_flag_variables().items()), (
        "what child processes are told"
    )


def test_docs_are_up_to_date():
    root = Path(trencadis.__file__).resolve().parent.parent
    page = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference_pages.make_configuration_page(), "run tools/gen_flags.py"


@pytest.mark.parametrize("text", ["1e3", "1_000", " 1000 ", "1k", "0.001M", "0.001m"])
def test_counts(text):
    assert value_parsers.parse_count(text, "x") in (1000, 1049)


def test_help_names_every_flag_and_no_hidden_one():
    shown = help_formatter.make_help_text()
    for flag in get_flag_table().values():
        assert (flag.written in shown.replace("[no-]", "")) == (not flag.hidden), flag.name
    assert max(map(len, shown.splitlines())) <= 120
    assert "--swap-space" in help_formatter.make_help_text("all") and "--policy" in help_formatter.make_help_text("all")
    assert help_formatter.make_help_text("max-model-len").startswith("  --max-model-len COUNT")
    assert "--port" not in help_formatter.make_help_text("engine")


def test_commands(capsys):
    assert cli.main(["version"]) == 0 and capsys.readouterr().out.strip() == trencadis.__version__
    assert cli.main([]) == 2 and cli.main(["--help"]) == 0 and "trencadis chat" in capsys.readouterr().out
    assert cli.main(["sevre"]) == 2 and "known are" in capsys.readouterr().err
    assert cli.main(["serve", "--prot", "1"]) == 2
    assert capsys.readouterr().err == "trencadis: unknown flag --prot; did you mean --port?\n"
    assert cli.main(["serve", "--help=port"]) == 0 and "--port INT" in capsys.readouterr().out


def test_what_starts_the_engine_is_light():
    """The engine imports torch meanwhile: whatever is imported before it is started delays the whole server."""
    root = Path(trencadis.__file__).resolve().parent.parent
    code = "import sys, trencadis.server.cli.serve\n"
    code += "print({'fastapi', 'numpy', 'PIL', 'pydantic', 'tokenizers', 'torch'} & set(sys.modules))"
    run = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "set()\n"


def test_time_of_help():
    """Printed, not asserted: the machine may be busy."""
    root = Path(trencadis.__file__).resolve().parent.parent
    begun = time.monotonic()
    code = "import sys; sys.argv[1:] = ['--help']; from trencadis.server.cli.main import serve_main; serve_main()\n"
    code += "print('torch' in sys.modules, 'fastapi' in sys.modules, 'numpy' in sys.modules)"
    run = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{code}"]
    out = subprocess.run(run, capture_output=True, text=True, check=True)
    print(f"serve --help: {time.monotonic() - begun:.2f} s")
    assert out.stdout.splitlines()[-1] == "False False False"
