"""Images and videos of this machine, in place of those that vLLM's tests fetch from a public host."""

from __future__ import annotations

import base64
import http.server
import io
import threading
import urllib.request
from functools import cache
from typing import Any

FRAMES, RATE = 40, 10
"""Length of every video in frames, and their number per second."""


@cache
def make_file(name: str) -> bytes:
    """Returns an image or a video: the end of its name says of which format."""
    return _make_video(name) if name.endswith((".mp4", ".avi")) else _make_image(name)


def _draw(shift: float = 0) -> Any:
    from PIL import Image

    return Image.effect_mandelbrot((128, 96), (-2 + shift, -1, 1 + shift, 1), 40)


def _make_image(name: str) -> bytes:
    out = io.BytesIO()
    mode = "RGBA" if "RGBA" in name else "L" if "Grayscale" in name else "RGB"
    _draw().convert(mode).save(out, "JPEG" if name.endswith("jpg") else "PNG")
    return out.getvalue()


def _make_video(name: str) -> bytes:
    import av

    out = io.BytesIO()
    with av.open(out, "w", format=name.rpartition(".")[2]) as file:
        stream: Any = file.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for index in range(FRAMES):
            frame = av.VideoFrame.from_image(_draw(index / FRAMES).convert("RGB"))
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


class _Files(http.server.BaseHTTPRequestHandler):
    """Serves a file under any name."""

    def do_GET(self) -> None:
        data = make_file(self.path.rpartition("/")[2])
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class LocalAssetServer:
    """Images and videos by HTTP on this machine."""

    def __init__(self) -> None:
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Files)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """The address without a name."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def url_for(self, name: str) -> str:
        """The address of a file."""
        return f"{self.url}/{name}"

    def get_image_asset(self, name: str) -> Any:
        """An image."""
        return fetch_image(self.url_for(name))

    def close(self) -> None:
        """Stops serving."""
        self._server.shutdown()


def fetch_image(url: str, *args: Any, **kwargs: Any) -> Any:
    """Returns the image at an address of this machine, and a drawn one for any other."""
    from PIL import Image

    if not url.startswith("http://127.0.0.1:"):
        return _draw().convert("RGB")
    with urllib.request.urlopen(url) as answer:
        return Image.open(io.BytesIO(answer.read()))


def fetch_video(url: str, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the frames of a video as images, and facts about them."""
    import av

    with av.open(io.BytesIO(make_file(url.rpartition("/")[2]))) as file:
        return [frame.to_image() for frame in file.decode(video=0)], {"fps": RATE}


def encode_image_url(image: Any, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """Returns an image as a data URL."""
    return f"data:image/{format.lower()};base64,{_encode(image.convert(image_mode), format)}"


def encode_video_url(frames: list[Any], **_: Any) -> str:
    """Returns images as the data URL of a video: JPEG files with commas between them."""
    return f"data:video/jpeg;base64,{','.join(_encode(frame, 'JPEG') for frame in frames)}"


def _encode(image: Any, format: str) -> str:
    out = io.BytesIO()
    image.save(out, format)
    return base64.b64encode(out.getvalue()).decode()
