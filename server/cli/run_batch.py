"""``trencadis run-batch``: its flags, files and exit codes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from trencadis.core.errors import StartupError
from trencadis.core.executor.engine_process_launcher import EngineHandle
from trencadis.core.operator_files import expand_path
from trencadis.core.process import log_setup
from trencadis.server.cli import batch_lines, batch_targets, serve
from trencadis.server.cli.batch_lines import ResultFile
from trencadis.server.cli.batch_runner import BatchLimits, BatchProgress, BatchRunner, BatchTarget
from trencadis.server.config import command_line_parser
from trencadis.server.config.resolve_settings import Settings, format_startup_lines, hide_keys, resolve_settings
from trencadis.server.processes import signals_and_logging
from trencadis.server.processes.start_engines import start_engines

log = logging.getLogger("trencadis.server")

DEFAULT_ROWS = 128
SHARED = 64
"""Maximum requests at a time on a server, which may have other users."""
ABOUT = """\
Answers a file of requests in OpenAI's batch form and writes one line for each, in the same order. Without --base-url an
engine of its own is started, and flags of `trencadis serve` may follow (--model, --dtype ...).
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags that are not the server's."""
    made = argparse.ArgumentParser("trencadis run-batch", description=ABOUT, allow_abbrev=False)
    add = made.add_argument
    add("-i", "--input-file", required=True, metavar="FILE", help="requests: a path, or a URL that GET fetches")
    add("-o", "--output-file", required=True, metavar="FILE", help="answers: a path, or a URL that takes a PUT")
    add("--output-tmp-dir", metavar="DIR", help="where files lie that come from or go to a URL")
    add("--resume", action="store_true", help="keep the answers that the output file has, and go on after them")
    add("--base-url", default="", metavar="URL", help="ask this server; its key is read from VLLM_API_KEY")
    add("--max-concurrency", type=int, metavar="N", help="requests at a time (default: twice --max-num-seqs; 64)")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--enable-metrics", action="store_true", help="serve Prometheus metrics while the batch runs")
    add("--host", "--url", default="0.0.0.0", metavar="HOST", help="address of the metrics")
    add("--port", type=int, default=8000, help="port of the metrics")
    return made


def normalise_dashes(words: Sequence[str]) -> list[str]:
    """Replaces ``_`` by ``-`` in the names of flags."""
    made = []
    for word in words:
        name, sign, value = word.partition("=")
        made.append((name.replace("_", "-") if name.startswith("--") else name) + sign + value)
    return made


def main(words: Sequence[str]) -> int:
    """Runs a batch: exit code 0 when every line has its answer or error, 1 when a signal ended it earlier.

    Raises:
        StartupError: the batch cannot start, or cannot go on.
    """
    args, rest = parser().parse_known_args(normalise_dashes(words))
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise StartupError("--max-concurrency must be at least 1.")
    if args.resume and batch_targets.is_url(args.output_file):
        raise StartupError("--resume needs an output file on this machine, not a URL.")
    if args.base_url:
        if rest:
            raise StartupError(f"{rest[0]} is for an engine of its own: with --base-url the server has one.")
        if not batch_targets.is_url(args.base_url):
            raise StartupError(f"--base-url {args.base_url[:80]}: must begin with http:// or https://.")
        log_setup.setup("INFO")
        return _run_with_files(args, lambda source, out: asyncio.run(_run_remote(args, source, out)))
    given = command_line_parser.parse(rest)
    if given.help is not None:
        parser().print_help()
        return 0
    signals_and_logging.raise_early_stop()
    asked = resolve_settings(given, os.environ)
    settings = batch_targets.make_private_settings(asked)
    signals_and_logging.set_up_logging(settings.engine, settings.server)
    if not settings.server.enable_log_requests:
        # One line for each request would be a million for a large batch.
        log.addFilter(lambda record: not record.getMessage().startswith("request "))
    for note in (*hide_keys(asked), *settings.notes):
        log.warning("%s", note)
    for line in format_startup_lines(settings):
        log.info("%s", line)
    return _run_with_files(args, lambda source, out: _run_local(args, settings, source, out))


def _run_with_files(args: argparse.Namespace, work: Any) -> int:
    """Calls ``work`` with paths of input and output; URLs are downloaded before and uploaded after."""
    if args.output_tmp_dir and not expand_path(args.output_tmp_dir).is_dir():
        raise StartupError(f"--output-tmp-dir {args.output_tmp_dir}: there is no such folder.")
    with tempfile.TemporaryDirectory(prefix="trencadis-batch-", dir=args.output_tmp_dir) as folder:
        source, out = expand_path(args.input_file), expand_path(args.output_file)
        if batch_targets.is_url(args.input_file):
            source = Path(folder) / "input.jsonl"
            batch_targets.download(args.input_file, source)
        if not source.is_file():
            raise StartupError(f"{source}: there is no such file.")
        if not batch_targets.is_url(args.output_file):
            if not out.parent.is_dir():
                raise StartupError(f"{out}: there is no folder {out.parent}.")
            if out.exists() and out.samefile(source):
                raise StartupError(f"{out}: input and output are the same file.")
            return int(work(source, out))
        out = _make_upload_file(args.output_tmp_dir)
        log.info("answers are collected in %s", out)
        code = int(work(source, out))
        if code == 0:
            batch_targets.upload(out, args.output_file)
            out.unlink()
        return code


def _make_upload_file(folder: str | None) -> Path:
    """Creates a file for output that is uploaded later; it survives errors, since it may have taken hours."""
    handle, name = tempfile.mkstemp(".jsonl", "batch-output-", folder)
    os.close(handle)
    return Path(name)


async def _run_remote(args: argparse.Namespace, source: Path, out: Path) -> int:
    running = args.max_concurrency or SHARED
    async with batch_targets.connect_to_server(args.base_url, batch_targets.find_api_key(), running) as target:
        return await _run(args, target, source, out, BatchLimits(running))


def _run_local(args: argparse.Namespace, settings: Settings, source: Path, out: Path) -> int:
    settings = serve.find_model(settings)
    size = settings.server.data_parallel_size
    running = args.max_concurrency or 2 * size * (settings.engine.max_num_seqs or DEFAULT_ROWS)
    limits = BatchLimits(running, longest=settings.server.max_body_bytes)
    handles: list[EngineHandle] = []
    try:
        engines = start_engines(settings.engine, size, settings.server.data_parallel_backend, handles.append)

        async def work() -> int:
            async with batch_targets.start_local_engine(settings, engines.configs, engines.handles) as target:
                with _serve_metrics(args, target):
                    await target.wait_ready()
                    return await _run(args, target, source, out, limits)

        return asyncio.run(work())
    except (signals_and_logging.EarlyStop, KeyboardInterrupt):
        log.error("stopped before the engine was ready")
        return 1
    finally:
        serve.end_engines(handles)


@contextlib.contextmanager
def _serve_metrics(args: argparse.Namespace, target: batch_targets.LocalEngine) -> Iterator[None]:
    if not args.enable_metrics:
        yield
        return
    from prometheus_client import start_http_server

    registry = target.app.state.trencadis.metrics.registry
    try:
        server, _ = start_http_server(args.port, args.host, registry)
    except OSError as error:
        raise StartupError(f"--port {args.port}: {error.strerror}.") from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextlib.asynccontextmanager
async def _watch_signals() -> AsyncIterator[asyncio.Event]:
    """Yields an event that the first signal sets; the signal also cancels the task inside."""
    stopped, task = asyncio.Event(), asyncio.current_task()
    assert task is not None

    def stop(*_: object) -> None:
        stopped.set()
        task.cancel()

    signals_and_logging.handle_in_loop(asyncio.get_running_loop(), stop, stop)
    yield stopped


async def _run(args: argparse.Namespace, target: BatchTarget, source: Path, out: Path, limits: BatchLimits) -> int:
    results = ResultFile(out, args.resume)
    progress = None
    try:
        reader = batch_lines.LineReader(source, limits.longest)
        total = await asyncio.to_thread(batch_lines.count, source)
        progress = BatchProgress(total, bar=not args.disable_tqdm)
        runner = BatchRunner(target, reader, results, progress, limits)
        runner.skip_written()
        progress.begin(results.next)
        async with _watch_signals() as stopped:
            try:
                await runner.run()
            except asyncio.CancelledError:
                if not stopped.is_set():
                    raise
                cast("asyncio.Task[Any]", asyncio.current_task()).uncancel()
    except OSError as error:
        raise StartupError(f"{out}: {error.strerror}; --resume goes on from there.") from None
    finally:
        if progress is not None:
            progress.close()
        results.close()
    log.info("%s", progress.format_line())
    if runner.first_error:
        log.warning("%d lines failed; the first: %s", progress.failed, runner.first_error)
    if results.next < total:
        log.error("the batch ended after %d of %d lines; --resume goes on from there", results.next, total)
        return 1
    return 0
