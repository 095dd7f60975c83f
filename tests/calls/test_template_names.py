"""The demo takes tools, names of templates in vLLM's guides find ours, and ``python -m trencadis`` is the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trencadis.assets import demo_path
from trencadis.core.errors import StartupError
from trencadis.server.text.chat_template import NAMES, ChatTemplate, find_template, read_override
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.tools.json_tool_parsers import HermesToolParser
from trencadis.server.tools.parser_registry import detect_tool_parser

ROOT = Path(__file__).resolve().parents[2]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def demo() -> Any:
    tokenizer = Tokenizer.from_checkpoint(demo_path())
    return tokenizer, ChatTemplate.from_checkpoint(demo_path(), tokenizer)


def render(demo: Any, messages: list[Any], tools: Any = None) -> str:
    tokenizer, template = demo
    return str(tokenizer.unmark(template.render(messages, tools=tools)))


def test_the_demo_renders_conversations_without_tools_as_before(demo: Any) -> None:
    talk = [
        {"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A"},
    ]
    image_mark = "<|vision_start|><|image_pad|><|vision_end|>"
    body = f"<|im_start|>user\n{image_mark}What?<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n<|im_start|>assistant\n"
    assert render(demo, talk) == "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + body
    assert render(demo, [{"role": "system", "content": "S"}, *talk]) == "<|im_start|>system\nS<|im_end|>\n" + body


def test_the_demo_shows_tools_calls_and_results(demo: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
    talk = [
        {"role": "user", "content": "How warm?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "20"},
    ]  # fmt: skip
    for first, said in (([], "You are a helpful assistant."), ([{"role": "system", "content": "S"}], "S")):
        text = render(demo, [*first, *talk], [TOOL])
        assert text.startswith(f"<|im_start|>system\n{said}\n\n# Tools\n") and text.count("<tools>") == 1
        shown = text.partition("<tools>\n")[2].partition("\n</tools>")[0]
        assert json.loads(shown) == TOOL
        assert "<|im_start|>user\n<tool_response>\n20\n</tool_response><|im_end|>\n" in text
        written = text.rpartition("<tool_call>\n")[2].partition("\n</tool_call>")[0]
        assert json.loads(written) == {"name": "weather", "arguments": {"city": "Köln"}}
    assert detect_tool_parser(demo[1].text) is HermesToolParser
    kept = json.loads((demo_path() / "tokenizer_config.json").read_text())["chat_template"]
    assert kept == (demo_path() / "chat_template.jinja").read_text()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_names_of_guides_find_our_own_form(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours = (ROOT / "examples" / "templates" / NAMES[name]).read_text()
    for written in (name, f"examples/{name}", f"./vllm/examples/tool_chat/{name}"):
        assert read_override(written) == ours
    (tmp_path / name).write_text("theirs")
    assert read_override(name) == "theirs", "a file that exists is taken"


def test_other_names_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_template("examples/templates/mistral.jinja") is not None
    for name in ("tool_chat_template_unknown.jinja", "none.text", "../pyproject.toml", "x" * 5000, ""):
        with pytest.raises(StartupError, match=r"no such file|name too long|s a directory"):
            read_override(name)


def test_python_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "trencadis", "--version"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
