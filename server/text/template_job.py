"""The job of a worker: compiles the template of a request, and renders a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trencadis.core.errors import BadRequest, StartupError
from trencadis.server.text.template_sandbox import compile_source, make_environment, render, unmark_text


def render_template(data: bytearray, options: dict[str, Any]) -> tuple[dict[str, Any], Sequence[memoryview]]:
    """The job of a worker.

    Args:
        data: JSON: the fields of ``chat_template.PreparedRendering``.
        options: none.

    Returns:
        ({}, [the marked text in UTF-8]), or ({"error", "param"}, []) where the template is wrong.
    """
    given = json.loads(data)
    marks: dict[str, str] = given["marks"]
    environment = make_environment(given["nonce"], lambda text: unmark_text(text, given["nonce"], marks))
    try:
        text = render(compile_source(environment, given["source"]), given["values"])
    except StartupError as error:
        return {"error": str(error), "param": "chat_template"}, []
    except BadRequest as error:
        return {"error": error.message, "param": error.param or "messages"}, []
    return {}, [memoryview(text.encode("utf-8", "surrogatepass"))]
