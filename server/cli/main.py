"""``trencadis {serve,chat,plan,quantize,check-...,devices,version}``. Imports of a sub-command wait until it runs."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from trencadis import __version__
from trencadis.core.errors import StartupError
from trencadis.core.process.log_setup import flush_logs
from trencadis.server.processes import signals_and_logging

USAGE = """\
usage: trencadis serve [MODEL] [--flag value ...]   an OpenAI-compatible server (--help says more)
       trencadis chat [--url URL] [--image FILE]    talk to a running server
       trencadis complete [PROMPT] [--url URL]      continue texts with a running server
       trencadis run-batch -i FILE -o FILE          answer a file of requests, in OpenAI's batch form
       trencadis bench serve|throughput|latency|startup    measure, in vLLM's terms
       trencadis plan [MODEL] --memory 96GiB        memory, shapes and warm-up of a start-up, without a device
       trencadis quantize MODEL OUT --to int4       a checkpoint again in 8 or 4 bits
       trencadis merge-lora MODEL ADAPTER OUT       a checkpoint again with a LoRA adapter in its weights
       trencadis check-backend NAME [--json]        whether a device does what the engine needs
       trencadis check-model PATH [--json]          whether a checkpoint's family computes what transformers does
       trencadis check-accuracy [MODEL]             answers about drawn images, ours and transformers'
       trencadis check-device [DEVICE]              its versions, each kernel, copies, a graph; check-hpu alike
       trencadis key new [NAME]                     an API key and its entry for --api-key-file
       trencadis collect-env                        versions, devices and settings for an issue, without secrets
       trencadis models                             the families of models that can be served
       trencadis devices                            what this machine can compute on
       trencadis version
"""

MODULES = {
    "chat": "trencadis.server.cli.chat_and_complete_commands",
    "complete": "trencadis.server.cli.chat_and_complete_commands:complete_main",
    "run-batch": "trencadis.server.cli.run_batch",
    "bench": "trencadis.server.bench.bench_command",
    "plan": "trencadis.server.plan.plan_command",
    "quantize": "trencadis.server.cli.quantize_and_merge_lora_commands",
    "merge-lora": "trencadis.server.cli.quantize_and_merge_lora_commands:merge_lora_main",
    "check-backend": "trencadis.server.cli.check_backend_and_compare_model",
    "check-model": "trencadis.server.cli.check_backend_and_compare_model:check_model_main",
    "check-accuracy": "trencadis.server.cli.check_accuracy",
    "key": "trencadis.server.tenants.tenant_registry:print_new_key",
    "models": "trencadis.server.cli.list_models",
    "collect-env": "trencadis.server.cli.collect_env",
}
"""Sub-commands and the functions that take the words after them: ``main`` of a module, or ``module:function``."""
COMMANDS = ("serve", *MODULES, "check-device", "devices", "version")
CHECK = "check-"
"""Prefix of commands: ``check-NAME`` of a built-in device is ``check-device NAME``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ``trencadis`` command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command, rest = (words[0], words[1:]) if words else ("", [])
    if command == "serve":
        return serve_main(rest)
    if command in MODULES:
        module, _, name = MODULES[command].partition(":")
        return _run_with_one_line_errors(lambda: int(getattr(import_module(module), name or "main")(rest)))
    if command == "check-device" or command.removeprefix(CHECK) in _list_checkable_devices(command):
        from trencadis.server.cli.check_device import main as device_main

        name = "" if command == "check-device" else command.removeprefix(CHECK)
        return _run_with_one_line_errors(lambda: device_main(rest, name))
    if command == "devices":
        return _run_with_one_line_errors(_print_devices)
    if command in ("version", "--version", "-V"):
        print(__version__)
        return 0
    if command in ("", "-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if command else 2
    known = ", ".join(COMMANDS[:-1])
    print(f"trencadis: unknown command {command}; known are {known} and {COMMANDS[-1]}.", file=sys.stderr)
    return 2


def _list_checkable_devices(command: str) -> tuple[str, ...]:
    """Returns the built-in devices, if ``command`` may name one."""
    if not command.startswith(CHECK):
        return ()
    from trencadis.core.devices import BUILT

    return BUILT


def serve_main(argv: Sequence[str] | None = None) -> int:
    """Runs the ``serve`` command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return _run_with_one_line_errors(lambda: _serve(words))


def _serve(words: Sequence[str]) -> int:
    from trencadis.server.config import command_line_parser, help_formatter

    if words in (["--version"], ["-V"]):
        print(__version__)
        return 0
    given = command_line_parser.parse(words)
    if given.help is not None:
        print(help_formatter.make_help_text(given.help), end="")
        return 0
    signals_and_logging.raise_early_stop()
    from trencadis.server.cli.serve import serve
    from trencadis.server.config.resolve_settings import resolve_settings

    return serve(resolve_settings(given, os.environ))


def _print_devices() -> int:
    from trencadis.core import devices

    print("\n".join(devices.describe_devices()))
    return 0


def _check_working_folder() -> None:
    """Raises StartupError if the working folder was removed: MKL, which torch brings, ends processes without one."""
    try:
        os.getcwd()
    except OSError as error:
        raise StartupError(f"the working folder cannot be used: {error.strerror}") from None


NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a start under small limits (``ulimit``, quotas) of files, processes, memory or disk space."""


def _run_with_one_line_errors(command: Callable[[], int]) -> int:
    """Runs a command: a StartupError prints one line and exits with 2, a signal during start-up exits with 0."""
    try:
        _check_working_folder()
        return command()
    except StartupError as error:
        flush_logs()  # the reason is the last line
        print(f"trencadis: {error}", file=sys.stderr)
        return 2
    except (signals_and_logging.EarlyStop, KeyboardInterrupt):
        return 0
    except OSError as error:
        if error.errno in NO_RESOURCES:
            flush_logs()
            print(f"trencadis: the system refuses: {error.strerror}", file=sys.stderr)
            return 2
        if not isinstance(error, BrokenPipeError):
            raise
        # The program that reads the output, such as ``head``, has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
