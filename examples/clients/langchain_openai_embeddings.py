"""langchain-openai: embeddings of documents and of a question, and the document that is nearest."""

from connect import options
from langchain_openai import OpenAIEmbeddings

o = options()
# The client would count tokens by OpenAI's own tokenizer and send ids of it: this sends the texts.
model = OpenAIEmbeddings(base_url=o.base_url, api_key=o.key, model=o.model, check_embedding_ctx_length=False)
documents = ["The circle is red.", "There are three stars.", "Hello there"]
vectors = model.embed_documents(documents)
query = model.embed_query("The circle is red.")
print("vectors:", len(vectors), "of", len(vectors[0]), "numbers")
near = max(range(len(documents)), key=lambda i: sum(a * b for a, b in zip(query, vectors[i], strict=True)))
print("nearest:", documents[near])
