"""``trencadis chat`` and ``complete``, vLLM's flags of ``chat``, and ``collect-env``, which shows no secret."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.cli.test_clients import server
from trencadis.core import devices
from trencadis.core.errors import StartupError
from trencadis.server.cli import chat_and_complete_commands, collect_env, main


def continuing(seen, status=200):
    def answer(request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "first"}]})
        seen.append((request.headers.get("authorization"), json.loads(request.content)))
        if status != 200:
            return httpx.Response(status, json={"error": {"message": "no room"}})
        pieces = [{"choices": [{"text": t}]} for t in (" upon", " a", None)] + [{"choices": []}]
        text = "".join(f"data: {json.dumps(p)}\n\n" for p in pieces) + "data: [DONE]\n\n"
        return httpx.Response(200, content=text.encode())

    return httpx.MockTransport(answer)


def over(monkeypatch, module, transport):
    real = httpx.Client
    monkeypatch.setattr(module.httpx, "Client", lambda **given: real(transport=transport, **given))


def test_complete_continues_a_text_or_each_line(monkeypatch, capsys):
    seen: list = []
    over(monkeypatch, chat_and_complete_commands, continuing(seen))
    words = ["--url", "http://x/v1", "--api-key", "k-e-y", "--max-tokens", "3"]
    assert main.main(["complete", "-q", "Once", *words]) == 0
    lines = iter(["One", "", "Two"])

    def typed(prompt):
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", typed)
    assert main.main(["complete", "--model-name", "m", *words]) == 0
    assert capsys.readouterr().out == " upon a\n" * 3
    assert [(k, b["model"], b["prompt"], b["max_tokens"]) for k, b in seen] == [
        ("Bearer k-e-y", "first", "Once", 3), ("Bearer k-e-y", "m", "One", 3), ("Bearer k-e-y", "m", "Two", 3),
    ]  # fmt: skip


def test_what_complete_cannot_do_is_one_line(monkeypatch):
    with pytest.raises(StartupError, match="no server answers at http:"):
        chat_and_complete_commands.complete_main(["x", "--url", "http://127.0.0.1:9/v1"])
    over(monkeypatch, chat_and_complete_commands, continuing([], 429))
    with pytest.raises(StartupError, match="answered 429: no room"):
        chat_and_complete_commands.complete_main(["x"])


def test_chat_takes_vllms_names(monkeypatch, capsys):
    seen: list = []
    over(monkeypatch, chat_and_complete_commands, server(seen)._transport)
    assert chat_and_complete_commands.main(["--quick", "hi", "--model-name", "m", "--system-prompt", "be kind"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert seen[0]["model"] == "m" and seen[0]["messages"][0] == {"role": "system", "content": "be kind"}


SECRETS = {
    "VLLM_API_KEY": "planted-key-1", "HF_TOKEN": "hf_abcdefghijklmnopqrstuv", "OPENAI_API_KEY": "planted-key-2",
    "AWS_SECRET_ACCESS_KEY": "pl/nted+key-3", "WANDB_API_KEY": "planted-key-4", "DB_PASSWORD": 'pl"nted\\key-5',
    "MY_CREDENTIALS": "planted-kéy-6", "TRENCADIS_UNKNOWN_TOKEN": "planted-key-7", "SESSION_COOKIE": "abcd",
    "VLLM_OTHER": "sk-ABCDEFGHIJKLMNOPQRSTUV", "TRENCADIS_CACHE": "s3://me:planted-key-8@host/x",
    "PYTHONPATH": "/opt/planted-key-4/lib", "LD_PRELOAD": "/x/tk-0123456789abcdefghijklmnop",
    "https_proxy": "http://me:planted-key-9@proxy:3128", "HABANA_LOGS": "/var/abcd/logs",
}  # fmt: skip
PLANTED = (*SECRETS.values(), "planted", "nted", "abcdefghijklmnop", "ABCDEFGHIJ", "abcd")


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_collect_env_shows_no_secret(monkeypatch, capsys, words):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert main.main(["collect-env", *words]) == 0
    said = capsys.readouterr().out
    assert not [one for one in PLANTED if one in said]
    for one in ("VLLM_API_KEY", "OMP_NUM_THREADS", "7", "torch", "TRENCADIS_CACHE", "@host/x", "cpu"):
        assert one in said
    assert devices.kernels() in said
    assert "proxy" not in said
    if words:
        assert set(json.loads(said)) == {"Trencadis", "System", "CPU", "Devices", "Packages", "Variables"}


def test_collect_env_tells_of_a_broken_stack(monkeypatch, capsys):
    def broken():
        raise RuntimeError("driver and library differ")

    monkeypatch.setattr(devices, "describe_devices", broken)
    assert collect_env.main([]) == 0
    assert "cannot be listed: RuntimeError: driver and library differ" in capsys.readouterr().out
    with pytest.raises(StartupError, match="does not know --yaml"):
        collect_env.main(["--yaml"])
