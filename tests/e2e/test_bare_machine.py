"""Offline use needs neither the wire's codec nor a web framework: a bare GPU machine runs it from a checkout."""

from __future__ import annotations

from tests.traffic.bare_machine import run_without_packages

CHAT = """
from trencadis import LLM, SamplingParams
llm = LLM(dtype="float32", kv_cache_memory_bytes=16 << 20, threads=1)
talk = [{"role": "user", "content": "Who are you?"}]
print(llm.chat(talk, SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)[0].outputs[0].text)
llm.close()
"""


def test_offline_chat_without_server_packages() -> None:
    done = run_without_packages(CHAT, "transformers")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().startswith("I am")
