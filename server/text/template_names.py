"""Names of chat templates that vLLM's guides give, and our own templates of the same forms (examples/templates)."""

from __future__ import annotations

from pathlib import Path

NAMES = {
    "tool_chat_template_hermes.jinja": "qwen2_5_vl_hermes.jinja",
    "tool_chat_template_llama3_json.jinja": "llama3_json.jinja",
    "tool_chat_template_llama3.1_json.jinja": "llama3_json.jinja",
    "tool_chat_template_llama3.2_json.jinja": "llama3_json.jinja",
    "tool_chat_template_mistral.jinja": "mistral.jinja",
    "tool_chat_template_mistral3.jinja": "mistral.jinja",
    "tool_chat_template_mistral_parallel.jinja": "mistral.jinja",
    "template_vlm2vec.jinja": "vlm2vec.jinja",
    "template_vlm2vec_qwen2vl.jinja": "vlm2vec.jinja",
    "template_vlm2vec_phi3v.jinja": "vlm2vec_full.jinja",
}
"""File names of vLLM's examples and ours; each has the same form, and none is a copy."""


def find_template(name: str) -> Path | None:
    """The file of our own template that the path ``name`` means, by our name or by vLLM's; None: there is none.

    A file that exists is taken before; see ``chat_template.read_override``.
    """
    last = name.replace("\\", "/").rpartition("/")[2]
    root = Path(__file__).resolve().parents[2]
    for folder in (root / "assets" / "templates", root / "examples" / "templates"):  # installed, and in a checkout
        file = folder / NAMES.get(last, last)
        if file.suffix == ".jinja" and file.is_file():
            return file
    return None
