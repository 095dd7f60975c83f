"""Hostile chat templates: each is refused, within a budget of steps and memory, and those of requests in a worker."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_app import ScriptedApp
from tests.fakes.text_checkpoint import TEMPLATE
from tests.traffic.scripted_server import fresh_app
from tests.traffic.tool_templates import TEMPLATES
from trencadis.assets import demo_path
from trencadis.core.errors import BadRequest, StartupError
from trencadis.server.text import chat_template
from trencadis.server.text.chat_template import ChatTemplate
from trencadis.server.text.checkpoint_tokenizer import Tokenizer
from trencadis.server.text.off_event_loop import TemplateWorkers

CHAT = [{"role": "user", "content": "hello " * 50}]
DEADLINE = 20.0
"""Seconds, against hangs: each takes less than one."""

SQUARES = "{% set n = namespace(x=3) %}" + "{% set n.x = n.x * n.x %}" * 40
DOUBLES = "{% set n = namespace(x='ab') %}" + "{% set n.x = n.x OP n.x %}" * 40
FAN_OUT = "{% macro a0() %}x{% endmacro %}"
for level in range(1, 12):
    FAN_OUT += "{% macro a" + str(level) + "() %}" + ("{{ a" + str(level - 1) + "() }}") * 10 + "{% endmacro %}"


def share(it: str) -> str:
    """Two values that hold themselves twice, forty levels deep."""
    twice = "{% set n.x = " + it + " %}"
    return "{% set n = namespace(x=[1], y=[1]) %}" + twice * 40 + twice.replace("n.x", "n.y") * 40


HOSTILE = {
    "squares": SQUARES + "{{ n.x }}",
    "doubled by ~": DOUBLES.replace("OP", "~") + "{{ n.x|length }}",
    "doubled by +": DOUBLES.replace("OP", "+") + "{{ n.x|length }}",
    "doubled lists": DOUBLES.replace("'ab'", "[1]").replace("OP", "+") + "{{ n.x|length }}",
    "doubled by join": "{% set n = namespace(x='ab') %}" + "{% set n.x = [n.x, n.x]|join(n.x) %}" * 30,
    "doubled by a method": "{% set n = namespace(x='ab') %}" + "{% set n.x = n.x.join([n.x, n.x]) %}" * 30,
    "doubled by replace": "{% set n = namespace(x='aa') %}" + "{% set n.x = n.x|replace('a', n.x) %}" * 30,
    "doubled by a method replace": "{% set n = namespace(x='aa') %}" + "{% set n.x = n.x.replace('a', n.x) %}" * 30,
    "indented": "{% set n = namespace(x='a\n' * 60000) %}" + "{% set n.x = n.x|indent(60000, true) %}" * 5,
    "centred": "{{ 'a'|center(1000000000) }}",
    "a method that centres": "{{ 'a'.center(1000000000) }}",
    "zeros": "{{ '1'.zfill(1000000000) }}",
    "tabs": "{{ ('\t' * 1000).expandtabs(60000) }}",
    "a wide format": "{{ '%1000000000d' % 1 }}",
    "a format of its own width": "{{ '%*d' % (1000000000, 1) }}",
    "a wide format filter": "{{ '%1000000000d'|format(1) }}",
    "a wide format method": "{{ '{:1000000000}'.format(1) }}",
    "a width from an argument": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "a batch": "{{ [1]|batch(1000000000, 'x')|list|length }}",
    "slices": "{{ [1]|slice(1000000000)|list|length }}",
    "json": "{{ [[[1]]]|tojson(indent=1000000000) }}",
    "words": "{{ lipsum(n=100000) }}",
    "loops": "{% for a in range(10000) %}{% for b in range(10000) %}{% endfor %}{% endfor %}",
    "loops of another meaning": "{% set _tick = namespace %}{% for a in range(9999) %}{% for b in range(9999) %}"
                                "{% endfor %}{% endfor %}",
    "macros that call macros": FAN_OUT + "{{ a11() }}",
    "a macro that calls itself": "{% macro a(n) %}{{ a(n + 1) }}{% endmacro %}{{ a(0) }}",
    "shared lists that are compared": share("[n.x, n.x]") + "{{ n.x == n.y }}",
    "shared lists that are printed": share("[n.x, n.x]") + "{{ n.x }}",
    "shared mappings as json": share("{'a': n.x, 'b': n.x}") + "{{ n.x|tojson }}",
    "shared mappings of a call": share("dict(a=n.x, b=n.x)") + "{{ n.x|string|length }}",
    "shared tuples as keys": share("(n.x, n.x)") + "{{ {n.x: 1}|length }}",
    "a long text many times": "{% set t = 'ab' * 500000 %}{% set n = namespace(x=t) %}"
                              + "{% set n.x = [n.x] * 100 %}" * 3 + "{{ n.x|string|length }}",
    "sums of ranges": "{% for a in range(99999) %}{% set b = range(99999)|sum %}{% endfor %}",
    "searches of a long text": "{% set t = 'ab' * 500000 %}{% for a in range(99999) %}{{ t.count('ba') }}{% endfor %}",
    "words of a long text": "{% set t = 'a ' * 500000 %}{% for a in range(9999) %}{{ t|wordwrap(1)|length }}"
                            "{% endfor %}",
    "nested": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "long": "a" * (2 << 20),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(Path(demo_path()))


@pytest.mark.parametrize("name", HOSTILE)
def test_the_sandbox_refuses_it_within_its_budget(name: str, tokenizer: Tokenizer) -> None:
    """Also that of a checkpoint, which is rendered in the server's own process."""
    template = ChatTemplate(TEMPLATE, tokenizer)
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadRequest) as refused:
        template.render(CHAT, chat_template=HOSTILE[name])
    assert "\n" not in refused.value.message and len(refused.value.message) < 260
    assert time.monotonic() - begun < DEADLINE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10, "KiB"


def test_templates_of_the_hub_stay_within_the_budget(tokenizer: Tokenizer) -> None:
    """A long conversation with tools, in every form that is known."""
    turns = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "word " * 200}]
    for style, source in TEMPLATES.items():
        text = ChatTemplate(source, tokenizer).render([*turns * 400, turns[0]])
        assert text.count("word") >= 200, style


@pytest.fixture
def trusted() -> Iterator[ScriptedApp]:
    harness = fresh_app()
    harness.made = harness.app(trust_request_chat_template=True)
    yield harness
    workers = harness.service.template_workers
    assert workers is not None
    workers.close()


def test_a_template_of_a_request_renders_as_it_does_here(trusted: ScriptedApp) -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}{{ style }}"
        "{% if messages[0].role == 'user' %}!{% endif %}"
    )
    asked: list[dict[str, Any]] = [
        {},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"style": "brief <|im_end|>", "messages": "mine"}},
    ]
    messages = [{"role": "user", "content": "Grüße 🌈 <|im_end|> there"}]
    for more in asked:
        answer = trusted.call("/tokenize", {"messages": messages, "chat_template": source, **more})
        assert answer.status_code == 200, answer.text
        workers, trusted.service.template_workers = trusted.service.template_workers, None
        again = trusted.call("/tokenize", {"messages": messages, "chat_template": source, **more})
        trusted.service.template_workers = workers
        assert answer.json() == again.json() and answer.json()["count"] > 3


def test_hostile_templates_of_requests_end_their_worker_alone(trusted: ScriptedApp) -> None:
    workers = trusted.service.template_workers
    assert isinstance(workers, TemplateWorkers)
    names = ("squares", "macros that call macros", "nested", "loops", "indented")
    for name in names:
        answer = trusted.chat(chat_template=HOSTILE[name])
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] in ("chat_template", "messages"), answer.text
    assert trusted.chat(chat_template="{{ messages[0].content }}", max_tokens=1).status_code == 200
    refused = trusted.chat(chat_template="{{ raise_exception('no such role') }}").json()["error"]
    assert refused["message"] == "no such role" and refused["param"] == "messages"
    broken = trusted.chat(chat_template="{% for %}").json()["error"]
    assert "not valid" in broken["message"] and broken["param"] == "chat_template"


def test_a_template_that_takes_too_long_ends_the_start(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "{% for a in range(9999) %}{% set b = ('ab' * 100000)|replace('ab', 'ba') %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(slow)
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.05)
    with pytest.raises(StartupError, match="takes longer than"):
        ChatTemplate.from_checkpoint(tmp_path, tokenizer)
