"""anthropic: an answer at once, the same as it is written, an image, and a prompt's tokens."""

from anthropic import Anthropic
from connect import image_base64, options

o = options()
client = Anthropic(base_url=o.server, api_key=o.key)
talk = [{"role": "user", "content": "Who are you?"}]

answer = client.messages.create(model=o.model, max_tokens=60, messages=talk)
print("answer:", answer.content[0].text)

print("stream: ", end="")
with client.messages.stream(model=o.model, max_tokens=60, messages=talk) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print("\nstop_reason:", stream.get_final_message().stop_reason)

image = [
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image_base64()}},
    {"type": "text", "text": "What shape is the red one?"},
]
seen = client.messages.create(model=o.model, max_tokens=40, messages=[{"role": "user", "content": image}])
print("picture:", seen.content[0].text)
# This API counts tokens that the prefix cache has apart from input_tokens.
used = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
print("tokens:", client.messages.count_tokens(model=o.model, messages=talk).input_tokens, used)
