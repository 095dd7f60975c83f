"""Image preprocessing: decode workers against bare Pillow calls in as many processes, taking turns.

Images are 1024x1024 JPEG photographs (smooth colours, noise, lettering). *bare* opens, converts and resizes them with
Pillow alone. *pool* makes the same calls as a job of the decode workers. *whole* takes files to patches as a request
does, without caches, and measures how late the event loop wakes up meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from benchmarks.harness.reporting import Others, environment, median, quantile, report, table
from trencadis.multimodal.decode_workers.worker_pool import Job, WorkerPool
from trencadis.multimodal.images.image_decode_client import ImageDecoder
from trencadis.multimodal.images.image_header import inspect_header
from trencadis.multimodal.qwen2_vl.processor import Qwen2VLImageProcessor

SIDE = 1024
DIFFERENT = 8
RATIO = 0.9
LAG = 0.010
PROCESSOR = Qwen2VLImageProcessor(3136, 12845056)


def images() -> list[bytes]:
    """JPEG files, the same in every process."""
    rng, out = np.random.default_rng(0), []
    for _ in range(DIFFERENT):
        small = Image.fromarray(rng.integers(0, 256, (17, 17, 3), np.uint8))
        wide = np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = np.clip(wide + rng.normal(0, 8, wide.shape).astype(np.int16), 0, 255).astype(np.uint8)
        image = Image.fromarray(noisy)
        ImageDraw.Draw(image).text((100, 100), "Trencadis", fill="white", font_size=120)
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        out.append(file.getvalue())
    return out


def resize(data: bytes | bytearray) -> Image.Image:
    """The bare Pillow calls."""
    height, width = PROCESSOR.target_size(SIDE, SIDE)
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as image:
        return image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)


def resized(data: bytearray, options: dict[str, Any]) -> tuple[dict[str, Any], list[memoryview]]:
    """The bare Pillow calls as a decode worker's job, which shows the pool's own cost."""
    return {}, [memoryview(np.asarray(resize(data)).reshape(-1))]  # type: ignore[arg-type]


def child(count: int) -> None:
    """A process of the bare side: resizes ``count`` images for each line of its input."""
    files = images()
    for _ in sys.stdin:
        cpu = time.process_time()
        for i in range(count):
            resize(files[i % DIFFERENT])
        print(time.process_time() - cpu, flush=True)


class Bare:
    """The bare side: as many processes as the pool has."""

    def __init__(self, size: int, count: int) -> None:
        command = [sys.executable, "-P", "-m", "benchmarks.media", "--child", str(count)]
        pipe = subprocess.PIPE
        self.count = size * count
        self.processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment(), text=True) for _ in range(size)
        ]
        self.round()

    def round(self) -> tuple[float, float]:
        """(wall, CPU) seconds per image."""
        begun = time.perf_counter()
        for p in self.processes:
            assert p.stdin is not None
            p.stdin.write("go\n")
            p.stdin.flush()
        cpu = sum(float(p.stdout.readline()) for p in self.processes if p.stdout is not None)
        return (time.perf_counter() - begun) / self.count, cpu / self.count

    def close(self) -> None:
        """Ends the processes."""
        for p in self.processes:
            p.communicate()


class Ours:
    """A decoder and its workers. ``whole``: file to patches; else the workers run the bare Pillow calls."""

    def __init__(self, size: int, count: int, whole: bool) -> None:
        self.count = size * count
        self.size = size
        self.whole = whole
        self.files = images()
        self.decoder = ImageDecoder(threads=size, pool=WorkerPool(size, jobs={"resized": "benchmarks.media:resized"}))
        self.lags: list[float] = []
        self.round()
        self.lags.clear()

    def round(self) -> tuple[float, float]:
        """(wall, CPU) seconds per image; CPU of this process and its workers."""
        cpu, begun = self._cpu(), time.perf_counter()
        asyncio.run(self._drive())
        return (time.perf_counter() - begun) / self.count, (self._cpu() - cpu) / self.count

    async def _drive(self) -> None:
        left = iter(range(self.count))

        async def client() -> None:
            for i in left:
                data = self.files[i % DIFFERENT]
                if self.whole:
                    header = await self.decoder.run(lambda d=data: inspect_header(d))  # type: ignore[misc]
                    await self.decoder.prepare(data, header, PROCESSOR, "")
                else:
                    await self.decoder.pool.run(Job("resized", {}), data)

        watch = asyncio.ensure_future(self._watch())
        await asyncio.gather(*(client() for _ in range(2 * self.size)))
        watch.cancel()

    async def _watch(self) -> None:
        while True:
            due = time.perf_counter() + 0.002
            await asyncio.sleep(0.002)
            self.lags.append(time.perf_counter() - due)

    def _cpu(self) -> float:
        ticks = os.sysconf("SC_CLK_TCK")
        total = time.process_time()
        for pid in self.decoder.pool.pids():
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                fields = file.read().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
        return total

    def close(self) -> None:
        """Ends the processes."""
        self.decoder.close()


def idle_lags(seconds: float) -> list[float]:
    """How late an idle event loop wakes up: what the machine itself costs."""

    async def watch() -> list[float]:
        lags, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            due = time.perf_counter() + 0.002
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - due)
        return lags

    return asyncio.run(watch())


def measure(size: int, count: int, repeats: int) -> dict[str, Any]:
    """Measures all sides, taking turns."""
    idle = idle_lags(1.0)
    sides: dict[str, Any] = {
        "bare": Bare(size, count), "pool": Ours(size, count, False), "whole": Ours(size, count, True),
    }  # fmt: skip
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            rounds[name].append(side.round())
    lags = sides["whole"].lags
    for side in sides.values():
        side.close()
    figures: dict[str, Any] = {}
    for name, found in rounds.items():
        figures[name] = {
            "images_per_second": median(1 / wall for wall, _ in found),
            "wall_ratio": median(b[0] / o[0] for b, o in zip(rounds["bare"], found, strict=True)),
            "cpu_ms": median(cpu * 1e3 for _, cpu in found),
        }
    return {
        "processes": size,
        "sides": figures,
        "rounds": rounds,
        "loop_lag_p99_ms": quantile(lags, 0.99) * 1e3,
        "loop_lag_max_ms": max(lags) * 1e3,
        "idle_loop_lag_p99_ms": quantile(idle, 0.99) * 1e3,
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    others = Others()
    size = WorkerPool().size
    found = measure(size, 16, 3 if args.quick else 7)
    rows: list[tuple[Any, ...]] = [
        (name, s["images_per_second"], s["wall_ratio"], s["cpu_ms"]) for name, s in found["sides"].items()
    ]
    rows.append(("event loop late, p99 ms", found["loop_lag_p99_ms"], "", ""))
    rows.append(("the same, idle loop", found["idle_loop_lag_p99_ms"], "", ""))
    text = table(("1024x1024 JPEG", "images/s", "of bare", "CPU ms"), rows)
    report("media", {**found, "quick": args.quick, "others_cores": others.cores()}, text)
    if found["sides"]["pool"]["wall_ratio"] < RATIO or found["loop_lag_p99_ms"] > LAG * 1e3:
        sys.exit("image preprocessing misses a bar")


if __name__ == "__main__":
    main()
