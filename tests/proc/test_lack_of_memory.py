"""An engine process whose device runs out of memory says so in one line; any other error comes with its traceback."""

from __future__ import annotations

import logging
import socket
from typing import Any, NoReturn

import pytest

from trencadis.core.device.backend import OutOfDeviceMemory
from trencadis.core.engine_config import EngineConfig
from trencadis.core.process import engine_process, log_setup

WORKSPACE = "Exception in Launch thread...\nworkspace Allocation of size ::1073741824 failed!"


@pytest.mark.parametrize(("error", "traced"), [(OutOfDeviceMemory(WORKSPACE), False), (RuntimeError("odd"), True)])
def test_a_lack_of_memory_has_no_traceback(
    error: Exception, traced: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(engine_process, "Inbox", lambda *_: type("Started", (), {"start": lambda _: EngineConfig()})())
    monkeypatch.setattr(log_setup, "setup", lambda *_: None)
    ours, theirs = socket.socketpair()
    with ours, theirs, caplog.at_level(logging.ERROR):
        process: Any = engine_process.EngineProcess(theirs)
        monkeypatch.setattr(process, "load", fail)
        assert process.main() == 1
        (record,) = caplog.records
        assert bool(record.exc_info) is traced and "\n" not in record.getMessage()
        assert (" ".join(WORKSPACE.split()) in record.getMessage()) is not traced
