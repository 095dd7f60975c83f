"""Files that pose as torch.save's: none runs code, none takes 64 MB or a second, each is refused in one line."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from trencadis.core.checkpoint.weight_file_reader import read_file
from trencadis.core.errors import StartupError

MARKER = "TRENCADIS_HOSTILE_RAN"
SECONDS = 1.0
BYTES = 64 << 20


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(number(v) for v in values) + b"t"


def storage(key: str = "0", count: int = 4, kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + named("torch", kind) + text(key) + text("cpu") + number(count) + b"tQ"


HOOKS = named("collections", "OrderedDict") + b")R"


def tensor(
    held: bytes | None = None, offset: int = 0, shape: tuple[int, ...] = (4,), strides: tuple[int, ...] = (1,),
    hooks: bytes = HOOKS,
) -> bytes:  # fmt: skip
    view = number(offset) + numbers(shape) + numbers(strides)
    return named("torch._utils", "_rebuild_tensor_v2") + b"(" + (held or storage()) + view + b"\x89" + hooks + b"tR"


def model(*values: bytes) -> bytes:
    """A state dict a, b, ... of values."""
    return b"\x80\x02}(" + b"".join(text(chr(97 + i)) + v for i, v in enumerate(values)) + b"u."


def archive(
    program: bytes, data: dict[str, bytes] | None = None, *, method: int = zipfile.ZIP_STORED,
    others: dict[str, bytes] | None = None,
) -> bytes:  # fmt: skip
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as z:
        z.writestr("m/data.pkl", program)
        for key, held in ({"0": bytes(16)} if data is None else data).items():
            z.writestr(f"m/data/{key}", held)
        for name, held in (others or {}).items():
            z.writestr(name, held)
    return out.getvalue()


class Runs:
    """Leaves a mark in the environment when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, str]]:
        return os.putenv, (MARKER, "1")


class Calls:
    """What pickle makes of a call of ``called``."""

    def __init__(self, called: Callable[..., object], *given: object) -> None:
        self.called, self.given = called, given

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.called, self.given


def patched(at: Callable[[bytes], int], value: bytes, good: bytes | None = None) -> bytes:
    made = bytearray(good or archive(model(tensor())))
    place = at(bytes(made))
    made[place : place + len(value)] = value
    return bytes(made)


def central(nth: int, offset: int) -> Callable[[bytes], int]:
    """Place of a field of the directory's entry ``nth``."""

    def find(data: bytes) -> int:
        place = -1
        for _ in range(nth + 1):
            place = data.index(b"PK\x01\x02", place + 1)
        return place + offset

    return find


def end(offset: int) -> Callable[[bytes], int]:
    return lambda data: data.rindex(b"PK\x05\x06") + offset


def zeros(count: int) -> bytes:
    return archive(b"\x80\x02" + b"0" * count, method=zipfile.ZIP_DEFLATED)


def other() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("x/y.txt", b"x")
    return out.getvalue()


def legacy() -> bytes:
    out = io.BytesIO()
    torch.save({"a": torch.ones(2)}, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def shared() -> bytes:
    """Two entries of the directory whose bytes are one another's."""
    made = archive(model(tensor(), tensor(storage("1"))), {"0": bytes(16), "1": bytes(16)})
    first = struct.unpack_from("<I", made, central(1, 42)(made))[0]
    return patched(central(2, 42), struct.pack("<I", first), made)


def crowded(count: int) -> bytes:
    """A directory of so many entries, all of one local header."""
    local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"a"
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    return local + entry * count + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(entry) * count, 31, 0)


PICKLES: dict[str, tuple[Callable[[], bytes], str]] = {
    "reduce of os.system": (lambda: pickle.dumps({"a": Calls(os.system, "touch ran")}, 2), "posix.system"),
    "reduce that sets a variable": (lambda: pickle.dumps({"a": Runs()}, 2), "posix.putenv"),
    "eval": (lambda: pickle.dumps({"a": Calls(eval, "1")}, 2), "__builtin__.eval"),
    "exec in protocol 4": (lambda: pickle.dumps({"a": Calls(exec, "1")}, 4), "protocol 4"),
    "protocol 0": (lambda: pickle.dumps(Runs(), 0), "posix.putenv"),
    "stack global": (lambda: b"\x80\x02" + text("os") + text("system") + b"\x93.", "STACK_GLOBAL"),
    "an instance by INST": (lambda: b"\x80\x02(ios\nsystem\n.", "INST"),
    "an object by OBJ": (lambda: b"\x80\x02(" + named("collections", "OrderedDict") + b"o.", "OBJ"),
    "NEWOBJ": (lambda: b"\x80\x02" + named("collections", "OrderedDict") + b")\x81.", "NEWOBJ"),
    "an extension": (lambda: b"\x80\x02\x82\x01.", "EXT1"),
    "an import of a module": (lambda: b"\x80\x02" + named("antigravity", "geohash") + b")R.", "antigravity.geohash"),
    "torch.load within": (lambda: b"\x80\x02" + named("torch", "load") + text("x") + b"\x85R.", "torch.load"),
    "a type is called": (lambda: b"\x80\x02" + named("torch", "float8_e5m2") + b")R.", "calls what"),
    "a storage's class is called": (lambda: b"\x80\x02" + named("torch", "FloatStorage") + b")R.", "calls what"),
    "hooks": (lambda: model(tensor(hooks=b"}" + text("h") + b"Ns")), "hooks"),
    "attributes of a tensor": (lambda: model(tensor() + b"}" + text("x") + b"Nsb"), "attributes"),
    "a value that is no tensor": (lambda: model(number(1)), "'a' is no tensor"),
    "a list": (lambda: b"\x80\x02].", "EMPTY_LIST"),
    "a name twice": (lambda: b"\x80\x02}(" + (text("a") + tensor()) * 2 + b"u.", "twice"),
    "a key that is no text": (lambda: b"\x80\x02}K\x01Ns.", "no text"),
    "no end": (lambda: model(tensor())[:-1], "cut off"),
    "an unknown opcode": (lambda: b"\x80\x02\xff.", "0xff"),
    "pops of nothing": (lambda: b"\x80\x02sss.", "not there"),
    "a mark that is not there": (lambda: b"\x80\x02u.", "not there"),
    "recall of nothing": (lambda: b"\x80\x02h\x07.", "never kept"),
    "a number of 2 GiB": (lambda: b"\x80\x02\x8b\xff\xff\xff\x7f.", "LONG4"),
    "a text of 4 GiB": (lambda: b"\x80\x02X\xff\xff\xff\xff.", "4294967295 bytes"),
    "nested marks": (lambda: b"\x80\x02" + b"(" * 100_000 + b".", "nests"),
    "nested tuples": (lambda: b"\x80\x02)" + b"\x85" * 2_000_000 + b".", "opcodes"),
    "a tall stack": (lambda: b"\x80\x02" + b")" * 1_000_000 + b".", "stacks"),
    "a memo of doubled tuples": (
        lambda: b"\x80\x02)" + b"".join(b"q%ch%c\x86" % (i % 256, i % 256) for i in range(100_000)) + b".",
        "opcodes|no dictionary",
    ),
    "a memo of many values": (
        lambda: b"\x80\x02" + b"".join(b"}r" + struct.pack("<I", i) + b"\x85" for i in range(600)) * 300 + b".",
        "stacks|opcodes",
    ),
    "2^40 elements in 16 bytes": (lambda: model(tensor(shape=(1 << 40,))), "beyond its storage"),
    "2^40 elements, one value": (lambda: model(tensor(shape=(1 << 40,), strides=(0,))), "repeats"),
    "2^40 elements stated": (lambda: model(tensor(storage(count=1 << 40), shape=(1 << 40,))), "16 bytes, not"),
    "sizes that overflow": (lambda: model(tensor(shape=(0, *[1 << 61] * 3), strides=(1,) * 4)), "out of range"),
    "a negative stride": (lambda: model(tensor(strides=(-1,))), "out of range"),
    "a negative offset": (lambda: model(tensor(offset=-4)), "out of range"),
    "an offset beyond": (lambda: model(tensor(offset=1)), "beyond its storage"),
    "shape and strides of two lengths": (lambda: model(tensor(strides=(1, 1))), "do not fit"),
    "a storage that is not there": (lambda: model(tensor(storage("../../../etc/passwd"))), "lacks the storage"),
    "a storage of a foreign class": (lambda: model(tensor(storage(kind="QInt8Storage"))), "torch.QInt8Storage"),
    "a storage in halves": (lambda: model(tensor(), tensor(storage(kind="HalfStorage"))), "not 4 x 2"),
    "bytes as a tensor of no type": (
        lambda: model(tensor(b"(" + text("storage") + named("torch.storage", "UntypedStorage") + text("0") + text("cpu")
                             + number(16) + b"tQ")), "of what is none"),
}  # fmt: skip
"""Program and what its line says."""

FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "an empty file": (lambda: b"", "no archive"),
    "torch.save before 1.6": (legacy, "before version 1.6"),
    "a bare pickle": (lambda: pickle.dumps(Runs(), 2), "before version 1.6"),
    "a file cut off": (lambda: archive(model(tensor()))[:-30], "cut off"),
    "a storage cut in the directory": (
        lambda: patched(central(1, 20), struct.pack("<II", 8, 8)), "has 8 bytes, not 4 x 4"),
    "a storage longer than the file": (lambda: patched(central(1, 20), struct.pack("<II", 999, 999)), "is cut off"),
    "storages that overlap": (shared, "another name|share bytes"),
    "entries that are one": (partial(crowded, 2), "twice"),
    "a directory of 60,000 entries": (partial(crowded, 60_000), "60000 entries"),
    "a directory beyond the file": (lambda: patched(end(16), b"\xf0\xff\xff\xff"), "damaged"),
    "a directory of 64 bits that is not there": (lambda: patched(end(16), b"\xff\xff\xff\xff"), "damaged"),
    "a pickle that is a zip bomb": (lambda: zeros(1 << 26), "compressed"),
    "a storage that is a zip bomb": (
        lambda: archive(model(tensor()), {"0": bytes(1 << 26)}, method=zipfile.ZIP_DEFLATED), "compressed"),
    "a pickle of 8 MB": (lambda: archive(b"\x80\x02" + b")" * (8 << 20)), "at most"),
    "a wrong checksum of the pickle": (lambda: patched(central(0, 16), b"\1\2\3\4"), "data.pkl is damaged"),
    "a wrong checksum of a storage": (lambda: patched(central(1, 16), b"\1\2\3\4"), "storage '0' is damaged"),
    "an encrypted entry": (lambda: patched(central(1, 8), b"\1\0"), "encrypted"),
    "a name that leaves the folder": (lambda: archive(model(tensor()), others={"../../x": b"x"}), "leads out"),
    "a name from the root": (lambda: archive(model(tensor()), others={"/etc/x": b"x"}), "leads out"),
    "two pickles": (lambda: archive(model(tensor()), others={"n/data.pkl": b"x"}), "no data.pkl"),
    "another archive": (lambda: other(), "no data.pkl"),
    "big-endian": (lambda: archive(model(tensor()), others={"m/byteorder": b"big"}), "little-endian"),
}  # fmt: skip


CASES = {name: (lambda make=make: archive(make()), said) for name, (make, said) in PICKLES.items()} | FILES


def refused(file: Path) -> tuple[str, float]:
    """The line, and the CPU seconds it took."""
    began = time.process_time()
    with pytest.raises(StartupError) as caught:
        list(read_file(file, []))
    return str(caught.value), time.process_time() - began


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_refused_in_one_line(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, said = CASES[name]
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(make())
    line, seconds = refused(file)
    head, _, why = line.partition(": ")
    assert head == f"{file} is not a readable PyTorch file" and "\n" not in line and len(why) < 200
    assert re.search(said, why), why
    assert seconds < 5 * SECONDS
    assert not (tmp_path / "ran").exists() and MARKER not in os.environ and "antigravity" not in sys.modules
    assert {p.name for p in tmp_path.iterdir()} == {file.name}, "a file was written"


def kept_dictionaries() -> bytes:
    """What makes most of 4 MB of opcodes: empty dictionaries, each kept, and texts of wide letters."""
    texts = b"".join(text(f"\U0001f600{i:04}" + "x" * 4000) + b"Ns" for i in range(600))
    kept = [b"}r" + struct.pack("<I", i) for i in range(150_000)]
    return b"\x80\x02}" + texts + b"".join(b"(" + b"".join(kept[i : i + 4000]) + b"t" for i in range(0, 150_000, 4000))


@pytest.mark.parametrize("name", ["a directory of 60,000 entries", "a pickle of 8 MB", "kept"])
def test_no_hostile_file_takes_64_mb(tmp_path: Path, name: str) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(archive(kept_dictionaries()) if name == "kept" else CASES[name][0]())
    tracemalloc.start()
    try:
        line, _ = refused(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "nests" not in line, "it ends early"
    assert peak < BYTES, peak
