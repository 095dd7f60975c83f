"""``make serve``: serves the bundled demo on the loopback and prints a request to paste once it is ready."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO_IMAGE = "assets/demo_picture.png"
QUESTION = "What is in the picture?"


def request(url: str, model: str) -> str:
    """A curl line with an image, for a POSIX shell; the image's base64 is spliced between single-quoted JSON.

    The body goes through standard input, because an argument of a command is limited to 128 KiB.
    """
    before = (
        f'{{"model":"{model}","max_tokens":64,"temperature":0,"messages":[{{"role":"user","content":['
        '{"type":"image_url","image_url":{"url":"data:image/png;base64,'
    )
    after = f'"}}}},{{"type":"text","text":"{QUESTION}"}}]}}]}}'
    image = shlex.quote(str(ROOT / DEMO_IMAGE))
    return (
        f"{{ printf %s '{before}'; base64 -w0 {image}; printf %s '{after}'; }} |\n"
        f"  curl -sS {url}/v1/chat/completions -H 'Content-Type: application/json' -d @-"
    )


def ready(url: str) -> bool:
    """Whether the server accepts requests."""
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    """Starts the server, waits until it is ready, prints how to use it, and stays until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    args, rest = parser.parse_known_args()
    url = f"http://127.0.0.1:{args.port}"
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT), env.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-P", "-m", "trencadis.server", "--host", "127.0.0.1", "--port", str(args.port)]
    command += ["--disable-access-log-for-endpoints=/health", *rest]
    server = subprocess.Popen(command, env=env)
    # Ctrl-C reaches the server too, which drains; this process waits for it to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: server.send_signal(signal.SIGTERM))
    while server.poll() is None and not ready(url):
        time.sleep(0.1)
    if server.poll() is None:
        print(f"\nReady. In another terminal:\n\n{request(url, 'trencadis-demo')}\n", flush=True)
        script = Path(sys.executable).with_name("trencadis")
        chat = str(script) if script.exists() else f"{sys.executable} -m trencadis.server.cli.main"
        print(f"Or: {chat} chat --url {url}", flush=True)
        print("Ctrl-C ends the server.\n", flush=True)
    return server.wait()


if __name__ == "__main__":
    sys.exit(main())
