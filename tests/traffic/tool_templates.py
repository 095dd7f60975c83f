"""Small chat templates, one for each form of calls: tools, calls of the history and their results, reasoning."""

from __future__ import annotations

HEAD = "{% for m in messages %}{% if m.role == 'tool' %}"
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
)
TURN = "{% else %}<|im_start|>{{ m.role }}\n" + PARTS
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}HOW<|im_end|>\n{% endif %}"


def template(how: str, call: str, result: str, end: str = OPEN) -> str:
    """A template that explains calls by ``how`` and writes each call of the history by ``call``."""
    calls = "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"
    return TOOLS.replace("HOW", how) + HEAD + result + TURN + calls + "<|im_end|>\n{% endif %}{% endfor %}" + end


HERMES = template(
    "Call by <tool_call>{name, arguments}</tool_call>.",
    '<tool_call>{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}</tool_call>',
    "<|im_start|>user\n<tool_response>" + PARTS + "</tool_response><|im_end|>\n",
)
QWEN3 = template(
    "Call by <tool_call><function=f><parameter=a>.",
    "<tool_call><function={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>",
    "<|im_start|>user\n<tool_response>{{ m.content }}</tool_response><|im_end|>\n",
)
LLAMA3 = template(
    'Call by {"name": ..., "parameters": ...}.',
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
    "<|im_start|>ipython\n{{ m.content }}<|im_end|>\n",
)
MISTRAL = template(
    "Call.",
    '{% if c.id | length != 9 %}{{ raise_exception("an id has 9 characters") }}{% endif %}'
    "[TOOL_CALLS]{{ c.function.name }}{{ c.function.arguments | tojson }}",
    "[TOOL_RESULTS]{{ m.tool_call_id }}{{ m.content }}[/TOOL_RESULTS]",
)
PYTHONIC = template(
    "Call by [func(param=value)].",
    "[{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{% endfor %})]",
    "<|im_start|>ipython\n{{ m.content }}<|im_end|>\n",
)
GEMMA4 = template(
    "Call.",
    "<|tool_call>call:{{ c.function.name }}{% raw %}{{% endraw %}{% for k, v in c.function.arguments.items() %}{{ k }}:"
    '<|"|>{{ v }}<|"|>{% endfor %}{% raw %}}{% endraw %}<tool_call|>',
    "<|tool_response>{{ m.content }}<tool_response|>",
)
LFM2 = PYTHONIC.replace("[{{ c.function.name }}", "<|tool_call_start|>[{{ c.function.name }}").replace(
    "{% endfor %})]", "{% endfor %})]<|tool_call_end|>"
)
TEMPLATES = {
    "hermes": HERMES,
    "qwen3": QWEN3,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "lfm2": LFM2,
    "gemma4": GEMMA4,
}
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if reasoning_effort %}E={{ reasoning_effort }}"
    "{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n"
    "</think>\n\n{% endif %}{% endif %}"
)
"""The model opens the reasoning itself, unless the request turns it off."""
OPENED = THINKING.replace("{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}", "<think>\n")
"""The prompt opens the reasoning."""
THINKING_HERMES = HERMES.replace(OPEN, OPEN.replace("{% endif %}", "<think>\n{% endif %}")) + "{# </think> #}"
