"""openai's Responses: text, its events, an image, a call and its result."""

from connect import get_weather, image_url, options
from openai import OpenAI

o = options()
client = OpenAI(base_url=o.base_url, api_key=o.key)
ask = {"model": o.model, "max_output_tokens": 100, "temperature": 0}

answer = client.responses.create(input="Who are you?", **ask)
print("answer:", answer.output_text)

kinds = []
with client.responses.stream(input="Who are you?", **ask) as stream:
    print("stream: ", end="")
    for event in stream:
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
print("\nevents:", kinds[0], "...", kinds[-1])

image = [
    {"type": "input_image", "image_url": image_url(), "detail": "auto"},
    {"type": "input_text", "text": "What shape is the red one?"},
]
print("picture:", client.responses.create(input=[{"role": "user", "content": image}], **ask).output_text)

tool = {
    "type": "function", "name": "get_weather", "description": "The weather in a city.", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
talk = [{"role": "user", "content": "How is the weather in Paris?"}]
first = client.responses.create(input=talk, tools=[tool], **ask)
calls = [item for item in first.output if item.type == "function_call"]
for call in calls:
    print("call:", call.name, call.arguments)
results = [{"type": "function_call_output", "call_id": c.call_id, "output": get_weather("Paris")} for c in calls]
if calls:
    print("then:", client.responses.create(input=[*talk, *first.output, *results], tools=[tool], **ask).output_text)
