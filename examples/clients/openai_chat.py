"""openai: an answer at once, the same answer as it is written, and a question about an image."""

from connect import image_url, options
from openai import OpenAI

o = options()
client = OpenAI(base_url=o.base_url, api_key=o.key)
messages = [{"role": "user", "content": "Who are you?"}]

answer = client.chat.completions.create(model=o.model, messages=messages, max_completion_tokens=60, temperature=0)
print("answer:", answer.choices[0].message.content)

stream = client.chat.completions.create(
    model=o.model, messages=messages, max_completion_tokens=60, temperature=0, stream=True,
    stream_options={"include_usage": True},
)  # fmt: skip
print("stream: ", end="")
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens; at once: {answer.usage.completion_tokens}")

content = [
    {"type": "image_url", "image_url": {"url": image_url()}},
    {"type": "text", "text": "What shape is the red one?"},
]
seen = client.chat.completions.create(
    model=o.model, messages=[{"role": "user", "content": content}], max_completion_tokens=40, temperature=0
)
print("picture:", seen.choices[0].message.content)
print(f"it took {seen.usage.prompt_tokens_details.image_tokens} of {seen.usage.prompt_tokens} tokens")
