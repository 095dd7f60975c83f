"""openai-agents: an agent with a function as its tool, run to its final answer."""

import asyncio

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from connect import get_weather, options
from openai import AsyncOpenAI

set_tracing_disabled(True)  # traces would go to OpenAI
o = options()
agent = Agent(
    name="Weather",
    instructions="Answer questions about the weather.",
    model=OpenAIChatCompletionsModel(o.model, AsyncOpenAI(base_url=o.base_url, api_key=o.key)),
    model_settings=ModelSettings(max_tokens=200),
    tools=[function_tool(get_weather)],
)


async def main() -> None:
    """Runs the agent."""
    run = await Runner.run(agent, "How is the weather in Paris?")
    for item in run.new_items:
        print("item:", item.type)
    print("answer:", run.final_output)


asyncio.run(main())
