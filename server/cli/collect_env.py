"""``trencadis collect-env``: facts about a machine for a bug report, without secrets."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from trencadis import __version__
from trencadis.core import devices, envs
from trencadis.core.cpu_affinity import available_cpus
from trencadis.core.errors import StartupError

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy", "pillow", "av",
    "fastapi", "starlette", "uvicorn", "h11", "httpx", "pydantic", "msgspec", "prometheus-client", "llguidance",
    "jinja2", "habana-torch-plugin", "habana-torch-dataloader", "opentelemetry-sdk", "vllm",
    "flash-attn", "flashinfer-python",
)  # fmt: skip
OTHERS = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "KMP_AFFINITY", "GOMP_CPU_AFFINITY", "LD_PRELOAD",
    "LD_LIBRARY_PATH", "MALLOC_ARENA_MAX", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_VISIBLE_DEVICES", "NCCL_DEBUG", "NCCL_P2P_DISABLE", "TORCH_CUDA_ARCH_LIST", "TRITON_CACHE_DIR",
    "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES", "HABANA_LOGS", "GC_KERNEL_PATH", "PT_HPU_LAZY_MODE", "HF_HOME",
    "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME", "PYTHONPATH", "VIRTUAL_ENV", "LANG",
)  # fmt: skip
"""Other programs' variables that affect the server; no other names are shown."""
FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")
HIDDEN = "***"
LEAST_SECRET = 4
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|SIGNATURE|PRIVATE", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_TOKENS = re.compile(r"\b(?:hf|ghp|gho|glpat|sk|tk|xox[abp]|AKIA)[-_]?[A-Za-z0-9_-]{16,}")
"""Pattern of API keys of hubs, forges and clouds, and of this server's."""
Section = dict[str, str]


def main(words: Sequence[str]) -> int:
    """Prints the report; with ``--json`` as one object."""
    unknown = [word for word in words if word not in ("--json", "-h", "--help")]
    if unknown:
        raise StartupError(f"collect-env does not know {unknown[0][:40]}; it takes --json.")
    if set(words) & {"-h", "--help"}:
        print("usage: trencadis collect-env [--json]\n\nPrints versions, devices and settings, without secrets.")
        return 0
    found = make_report(os.environ)
    if "--json" in words:
        print(redact_secrets(json.dumps(found, indent=1, ensure_ascii=False), os.environ))
        return 0
    for title, section in found.items():
        print(
            redact_secrets(
                f"{title}\n" + "".join(f"  {name:<28} {text}\n" for name, text in section.items()), os.environ
            )
        )
    return 0


def make_report(environ: Mapping[str, str]) -> dict[str, Section]:
    """Returns the report: title -> lines. Secrets by name are left out; ``redact_secrets`` removes the rest."""
    return {
        "Trencadis": {"version": __version__, "python": sys.version.split()[0], "folder": str(_find_install_folder())},
        "System": _describe_system(),
        "CPU": _describe_cpu(),
        "Devices": _describe_devices(),
        "Packages": {name: version for name in PACKAGES if (version := _get_version(name))},
        "Variables": _list_variables(environ),
    }


def redact_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Returns ``text`` without the values of variables with secret names, users in URLs, and known kinds of keys."""
    values = {v for name, v in environ.items() if _SECRET_NAME.search(name) and len(v) >= LEAST_SECRET}
    for value in sorted(values, key=len, reverse=True):
        for form in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
            text = text.replace(form, HIDDEN)
    return _TOKENS.sub(HIDDEN, _URL_USER.sub(HIDDEN, text))


def _find_install_folder() -> Path:
    return Path(__file__).resolve().parents[2]


def _describe_system() -> Section:
    release = _read_fields(Path("/etc/os-release"), "=")
    memory = _read_fields(Path("/proc/meminfo"), ":")
    return {
        "os": release.get("PRETTY_NAME", "").strip('"') or platform.platform(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "memory": f"{memory.get('MemTotal', 'unknown')}, {memory.get('MemAvailable', 'unknown')} available",
        "huge pages": _read_text(Path("/sys/kernel/mm/transparent_hugepage/enabled")),
        "/dev/shm": f"{shutil.disk_usage('/dev/shm').free >> 20} MiB free" if Path("/dev/shm").is_dir() else "none",
    }


def _describe_cpu() -> Section:
    found = _read_fields(Path("/proc/cpuinfo"), ":")
    flags = set((found.get("flags") or found.get("Features") or "").split())
    return {
        "model": found.get("model name") or platform.processor() or "unknown",
        "cpus": f"{os.cpu_count()} of the machine, {available_cpus()} for this process",
        "instructions": " ".join(flag for flag in FLAGS if flag in flags) or "none of note",
        "numa nodes": str(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1),
        "kernels": _describe_kernels(),
    }


def _describe_devices() -> Section:
    made = {f"device {i}": line for i, line in enumerate(_list_devices())}
    for tool, words in (
        ("nvidia-smi", ["--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]),
        ("hl-smi", ["-Q", "name,driver_version,memory.total", "-f", "csv,noheader"]),
    ):
        said = _run([tool, *words])
        made |= {f"{tool} {i}": line for i, line in enumerate(said.splitlines())}
    return made


def _list_devices() -> list[str]:
    try:
        return devices.describe_devices()
    except Exception as error:  # The report must also work with a broken stack.
        return [f"cannot be listed: {type(error).__name__}: {error}"]


def _describe_kernels() -> str:
    try:
        return devices.kernels()
    except Exception as error:  # The same here.
        return f"cannot be told: {type(error).__name__}: {error}"


def _list_variables(environ: Mapping[str, str]) -> Section:
    """Returns our variables, those of bucketing and ``OTHERS``; of secret ones only that they are set."""
    names = [*(one.name for one in envs.TABLE), *OTHERS]
    names += sorted(name for name in environ if name.startswith(envs.PREFIXES))
    shown = {name: environ[name] for name in dict.fromkeys(names) if name in environ}
    return {
        name: "set, not shown" if envs.secret(name) or _SECRET_NAME.search(name) else text[:400]
        for name, text in shown.items()
    }


def _get_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _read_fields(path: Path, sign: str) -> Section:
    """Returns the first value of each name in a file of lines ``name SIGN value``."""
    made: Section = {}
    for line in _read_text(path).splitlines():
        name, _, value = line.partition(sign)
        made.setdefault(name.strip(), value.strip())
    return made


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _run(command: Iterable[str], run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> str:
    try:
        return run([*command], capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
