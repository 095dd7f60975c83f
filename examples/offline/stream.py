"""Two answers at a time, printed as they come."""

from __future__ import annotations

import asyncio
import sys

from trencadis import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams


async def follow(llm: AsyncLLM, number: int, prompt: str) -> str:
    """Prints the pieces of one answer and returns the whole."""
    params = SamplingParams(temperature=0, max_tokens=16, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in llm.generate(prompt, params, f"request-{number}"):
        text += output.outputs[0].text
        print(f"{number}: {output.outputs[0].text!r}", flush=True)
    return text


async def run(model: str) -> list[str]:
    """Starts the engine in a process of its own and asks it twice."""
    async with AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, max_model_len=1024)) as llm:
        return await asyncio.gather(follow(llm, 1, "A circle is"), follow(llm, 2, "The colour of the sky is"))


def main(model: str = "") -> list[str]:
    """Returns the answers."""
    return asyncio.run(run(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
