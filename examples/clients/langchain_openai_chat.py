"""langchain-openai: text, a stream, an image, and a tool that is called."""

from connect import get_weather, image_url, options
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

o = options()
model = ChatOpenAI(base_url=o.base_url, api_key=o.key, model=o.model, max_completion_tokens=100, temperature=0)

print("answer:", model.invoke("Who are you?").content)
print("stream:", "".join(chunk.content for chunk in model.stream("Who are you?")))

image = [
    {"type": "image_url", "image_url": {"url": image_url()}},
    {"type": "text", "text": "What shape is the red one?"},
]
print("picture:", model.invoke([HumanMessage(image)]).content)

with_tools = model.bind_tools([tool(get_weather)])
talk = [HumanMessage("How is the weather in Paris?")]
first = with_tools.invoke(talk)
talk.append(first)
for call in first.tool_calls:
    print("call:", call["name"], call["args"])
    talk.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
if first.tool_calls:
    print("then:", with_tools.invoke(talk).content)
