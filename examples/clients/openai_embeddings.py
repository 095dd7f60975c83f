"""openai: embeddings of texts, as numbers and (the client's own default) as base64."""

from connect import options
from openai import OpenAI

o = options()
client = OpenAI(base_url=o.base_url, api_key=o.key)
texts = ["What shape is the red one?", "Which shape is red?", "How many circles are there?"]
found = [item.embedding for item in client.embeddings.create(model=o.model, input=texts).data]
plain = [item.embedding for item in client.embeddings.create(model=o.model, input=texts, encoding_format="float").data]
print("vectors:", len(found), "of", len(found[0]), "numbers")
print("equal:", all(abs(a - b) < 1e-6 for v, w in zip(found, plain, strict=True) for a, b in zip(v, w, strict=True)))


def cosine(a: list[float], b: list[float]) -> float:
    """How alike two vectors are; those of the server have length 1."""
    return sum(x * y for x, y in zip(a, b, strict=True))


print(f"cosine: itself {cosine(found[0], found[0]):.3f}, another wording {cosine(found[0], found[1]):.3f}, "
      f"another question {cosine(found[0], found[2]):.3f}")  # fmt: skip
