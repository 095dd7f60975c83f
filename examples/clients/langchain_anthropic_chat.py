"""langchain-anthropic: text, a stream, an image, and a tool that is called."""

from connect import get_weather, image_base64, options
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

o = options()
model = ChatAnthropic(base_url=o.server, api_key=o.key, model=o.model, max_tokens=100, temperature=0)

print("answer:", model.invoke("Who are you?").text)
print("stream:", "".join(chunk.text for chunk in model.stream("Who are you?")))

image = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image_base64()}},
    {"type": "text", "text": "What shape is the red one?"},
]
print("picture:", model.invoke([HumanMessage(image)]).text)

with_tools = model.bind_tools([tool(get_weather)])
talk = [HumanMessage("How is the weather in Paris?")]
first = with_tools.invoke(talk)
talk.append(first)
for call in first.tool_calls:
    print("call:", call["name"], call["args"])
    talk.append(ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]))
if first.tool_calls:
    print("then:", with_tools.invoke(talk).text)
