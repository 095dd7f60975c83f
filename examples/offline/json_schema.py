"""An answer that is JSON of a given schema, whatever the model would rather say."""

from __future__ import annotations

import json
import sys
from typing import Any

from trencadis import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "sides": {"type": "integer", "maximum": 9}},
    "required": ["colour", "sides"],
    "additionalProperties": False,
}


def main(model: str = "") -> Any:
    """Prints what was answered, parsed, and returns it."""
    # A small model likes to indent for ever: without white space every token says something.
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = SamplingParams(temperature=0, max_tokens=64, structured_outputs=form)
    with LLM(model, max_model_len=1024) as llm:
        (output,) = llm.chat([{"role": "user", "content": "Name a shape as JSON."}], params)
    answer = json.loads(output.outputs[0].text)
    print(answer)
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:])
