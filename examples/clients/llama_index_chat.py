"""LlamaIndex: text, a stream, an image, and a tool that is called."""

from connect import IMAGE, get_weather, options
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

o = options()
model = OpenAILike(
    api_base=o.base_url, api_key=o.key, model=o.model, is_chat_model=True, is_function_calling_model=True,
    max_tokens=100, temperature=0,
)  # fmt: skip
ask = ChatMessage(role="user", content="Who are you?")
print("answer:", model.chat([ask]).message.content)
print("stream:", "".join(part.delta or "" for part in model.stream_chat([ask])))

blocks = [ImageBlock(path=IMAGE), TextBlock(text="What shape is the red one?")]
print("picture:", model.chat([ChatMessage(role="user", blocks=blocks)]).message.content)

tool = FunctionTool.from_defaults(get_weather)
answer = model.chat_with_tools([tool], user_msg="How is the weather in Paris?")
for call in model.get_tool_calls_from_response(answer, error_on_no_tool_call=False):
    print("call:", call.tool_name, call.tool_kwargs, "->", tool(**call.tool_kwargs).content)
