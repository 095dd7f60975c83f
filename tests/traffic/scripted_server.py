"""A server over HTTP whose engine answers by a script: ``python -m tests.traffic.scripted_server --port 8123``.

Everything in front of the engine is what ``trencadis serve`` runs: sockets, connections, gate, routes. A request that
offers tools is answered by a call, one that holds a tool's result by a sentence; so clients can play a whole turn.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tests.fakes.scripted_app import ScriptedApp, ScriptedEngine, scripted_app
from tests.fakes.text_checkpoint import write_text_checkpoint
from trencadis.core.request import Delta, Request
from trencadis.server.config.server_config import ServerConfig
from trencadis.server.http.fastapi_app import create_app
from trencadis.server.http.listener import open_listener
from trencadis.server.http.uvicorn_server import make_server
from trencadis.server.routes.app_state import HttpSettings
from trencadis.server.routes.state_builder import make_state
from trencadis.server.text.chat_template import ChatTemplate
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

TEMPLATE = Path(__file__).resolve().parents[2] / "examples" / "templates" / "qwen2_5_vl_hermes.jinja"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
RESULT = "It is 21 degrees and clear in Paris."
PLAIN = "I answer by a script."


class ScriptedWeather(ScriptedEngine):
    """Calls ``get_weather`` where tools are offered, and repeats its result where there is one.

    Args:
        delay: seconds between two tokens.
    """

    def __init__(self, tokenizer: Tokenizer, eos: int, delay: float = 0.0) -> None:
        super().__init__([], eos)
        self.tokenizer, self.delay = tokenizer, delay

    def submit(self, request: Request, pixels: Sequence[Any]) -> AsyncIterator[Delta]:
        """See ScriptedEngine; what was submitted is not kept, for this server runs long."""
        found = super().submit(request, pixels)
        self.submitted.clear()
        return found

    async def _deltas(self, request: Request) -> AsyncIterator[Delta]:
        # Read at the first step, before anything else runs.
        self.answer = self.tokenizer.encode(answer_to(self.tokenizer.decode(request.tokens, False)))
        async for delta in super()._deltas(request):
            yield delta

    def abort(self, id: str, choice: int = -1) -> None:
        """Keeps the latest only."""
        super().abort(id, choice)
        del self.aborted[:-64]


def fresh_app() -> ScriptedApp:
    """An application over the small tokenizer, whose folder is gone once it is read."""
    with tempfile.TemporaryDirectory() as folder:
        return scripted_app(write_text_checkpoint(Path(folder)))


def answer_to(prompt: str) -> str:
    """The script."""
    if "<tool_response>" in prompt.rpartition("<|im_start|>assistant")[0]:
        return RESULT
    return CALL if "<tools>" in prompt else PLAIN


async def run(port: int, delay: float) -> None:
    """Serves until a signal."""
    harness = fresh_app()
    harness.service.template = ChatTemplate(TEMPLATE.read_text(encoding="utf-8"), harness.tokenizer)
    engine = ScriptedWeather(harness.tokenizer, harness.engine.eos, delay)
    config = ServerConfig(host="127.0.0.1", port=port, served_model_name=["scripted"], disable_uvicorn_access_log=True)
    app = create_app(make_state(HttpSettings(config), engine, harness.service))
    with open_listener(config) as sock:
        web = make_server(config, app, 2)

        def leave() -> None:
            web.should_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, leave)
        await web.serve(sockets=[sock])


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds between two tokens")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(run(given.port, given.delay))


if __name__ == "__main__":
    main()
