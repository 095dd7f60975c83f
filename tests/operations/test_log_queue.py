"""Lines of log wait in a queue that is bounded: a stderr that nothing reads stops no process."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from trencadis.core.process.log_setup import LogQueue, find_log_queue, flush_logs
from trencadis.server.metrics.process_tenant_and_sleep_collectors import LogCollector

DEADLINE = 20.0


class StuckStream(io.StringIO):
    """A stream whose writes wait until it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = threading.Event()

    def write(self, text: str) -> int:
        self.reader.wait(DEADLINE)
        return super().write(text)


def logger_of(queue: LogQueue) -> logging.Logger:
    queue.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log = logging.Logger("test")
    log.addHandler(queue)
    return log


def test_lines_keep_their_order() -> None:
    stream = io.StringIO()
    queue = LogQueue(stream)
    log = logger_of(queue)
    for number in range(1000):
        log.warning("line %d", number)
    queue.flush(DEADLINE)
    assert stream.getvalue() == "".join(f"WARNING line {n}\n" for n in range(1000)) and queue.dropped == 0


def test_a_stuck_reader_holds_up_nobody_and_lines_beyond_the_bound_are_counted() -> None:
    stream = StuckStream()
    queue = LogQueue(stream, most=2000)
    log = logger_of(queue)
    for number in range(500):
        log.info("line %03d", number)
    held = 2000 // len("INFO line 000\n")
    assert queue.dropped == 500 - held
    queue.flush(0.05)  # returns, although nothing was written
    assert stream.getvalue() == ""
    stream.reader.set()
    queue.flush(DEADLINE)
    log.info("read again")
    queue.flush(DEADLINE)
    lines = stream.getvalue().splitlines()
    assert [line for line in lines if line.startswith("INFO line")] == [f"INFO line {n:03}" for n in range(held)]
    counts = [re.fullmatch(r"WARNING (\d+) lines of log were dropped, because nothing read stderr", s) for s in lines]
    assert sum(int(found[1]) for found in counts if found is not None) == 500 - held
    assert "INFO read again" in lines and queue.dropped == 500 - held


def test_a_line_longer_than_the_bound_is_written() -> None:
    stream = io.StringIO()
    queue = LogQueue(stream, most=10)
    logger_of(queue).info("x" * 1000)
    queue.flush(DEADLINE)
    assert stream.getvalue() == f"INFO {'x' * 1000}\n"


def test_wrong_arguments_and_a_closed_stream_are_no_errors() -> None:
    stream = io.StringIO()
    queue = LogQueue(stream)
    log = logger_of(queue)
    log.info("%d", "no number")
    queue.flush(DEADLINE)
    assert "could not be formatted" in stream.getvalue() and "test_log_queue.py" in stream.getvalue()
    stream.close()
    log.info("lost")
    queue.flush(DEADLINE)
    assert queue.dropped == 1


def test_the_metric_counts_what_the_handler_of_this_process_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LogQueue(StuckStream(), most=100)
    monkeypatch.setattr(logging.getLogger(), "handlers", [queue])
    for _ in range(50):
        logger_of(queue).info("x" * 20)
    assert find_log_queue() is queue
    (family,) = LogCollector().collect()
    assert family.name == "vllm:log_lines_dropped" and family.samples[0].value == queue.dropped > 0


CODE = """
import logging, os, sys
from trencadis.core.process import log_setup
from trencadis.core.process.log_setup import flush_logs
log_setup.setup("INFO")
log = logging.getLogger("trencadis.server")
for number in range(20_000):
    log.info("%s %d", "x" * 100, number)
print("done", flush=True)
if sys.argv[1] == "exit":
    flush_logs(0.1)
    os._exit(0)
"""


@pytest.mark.parametrize("end", ["exit", "return"])
def test_a_process_whose_stderr_nothing_reads_works_and_ends(end: str) -> None:
    """20,000 lines are more than a pipe and the queue hold."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CODE, end], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    )
    assert process.stdout is not None and process.stderr is not None
    begun = time.monotonic()
    assert process.stdout.readline() == b"done\n"
    process.wait(DEADLINE)
    assert time.monotonic() - begun < DEADLINE
    process.stderr.close()
    process.stdout.close()


def test_the_last_lines_of_a_process_are_written(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-P", "-c", CODE, "exit"], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].endswith("x 19999")
    flush_logs()
