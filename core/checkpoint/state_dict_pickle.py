"""Reads the pickle of a torch.save file without unpickling it: nothing is imported and nothing is called. Torch-free.

A pickle is a program for a stack machine. The machine here implements the opcodes that torch.save emits (protocol 2)
and accepts five kinds of names: ordered dictionaries, tensors, parameters, storages and types; each becomes a plain
record. Anything else is refused with its name in the error. Opcodes: CPython's ``pickletools``; records:
``torch/_utils.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

MAX_PICKLE = 4 << 20
MAX_STEPS = 300_000
MAX_STACK = 4_096
MAX_MARKS = 32
MAX_TEXT = 4_096
MAX_DIMS = 8
MAX_SIZE = 1 << 62

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
"""torch's storage classes -> the dtype of their elements, as safetensors names it."""
TYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""Dtypes that have no storage class of their own: their storages are bytes."""


class Storage(NamedTuple):
    """Entry ``key`` of the archive: ``elements`` values of ``dtype``; dtype "": that many bytes."""

    dtype: str
    key: str
    elements: int


class StoredTensor(NamedTuple):
    """A strided view of a storage; ``offset`` and ``strides`` count elements of ``dtype``."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PickleName(NamedTuple):
    """A name in the program: ``kind`` is a key of ``PickleProgram.CALLS``, "storage" or "type"; ``dtype`` is its
    type.
    """

    kind: str
    dtype: str = ""


NAMES = {
    "collections OrderedDict": PickleName("dictionary"),
    "torch._utils _rebuild_tensor_v2": PickleName("tensor"),
    "torch._utils _rebuild_tensor_v3": PickleName("typed tensor"),
    "torch._utils _rebuild_parameter": PickleName("parameter"),
    "torch.storage UntypedStorage": PickleName("storage"),
    **{f"torch {name}": PickleName("storage", dtype) for name, dtype in STORAGES.items()},
    **{f"torch {name}": PickleName("type", dtype) for name, dtype in TYPES.items()},
}


def tensors(pickle: bytes) -> dict[str, StoredTensor]:
    """Returns the tensors of a pickled state dict by name.

    Raises:
        ValueError: it holds an opcode, a name or a value that no state dict has, or is damaged or too long.
    """
    if len(pickle) > MAX_PICKLE:
        raise ValueError(f"its data.pkl has {len(pickle)} bytes; at most {MAX_PICKLE} are read")
    return PickleProgram(pickle).run()


class PickleProgram:
    """The stack machine that interprets one pickle."""

    def __init__(self, pickle: bytes) -> None:
        self.pickle = pickle
        self.at = 0
        self.stack: list[object] = []
        self.marks: list[int] = []
        self.memo: dict[int, object] = {}

    def run(self) -> dict[str, StoredTensor]:
        steps, pickle = self.STEPS, self.pickle
        for _ in range(MAX_STEPS):
            if self.at >= len(pickle):
                raise ValueError("its data.pkl is cut off")
            code = pickle[self.at]
            self.at += 1
            if code == ord("."):
                return self._result()
            step = steps.get(code)
            if step is None:
                raise ValueError(f"its data.pkl uses the opcode {_opcode(code)}, which no state dict has")
            step(self)
            if len(self.stack) > MAX_STACK:
                raise ValueError("its data.pkl nests or stacks too many values")
        raise ValueError(f"its data.pkl has more than {MAX_STEPS} opcodes")

    def _result(self) -> dict[str, StoredTensor]:
        if len(self.stack) != 1 or self.marks or not isinstance(self.stack[0], dict):
            raise ValueError("its data.pkl holds no dictionary of tensors")
        held = self.stack[0]
        for name, value in held.items():
            if not isinstance(value, StoredTensor):
                raise ValueError(f"{name[:80]!r} is no tensor")
        return held

    def _bytes(self, count: int) -> bytes:
        found = self.pickle[self.at : self.at + count]
        if len(found) < count:
            raise ValueError("its data.pkl is cut off")
        self.at += count
        return found

    def _number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self._bytes(count), "little", signed=signed)

    def _pop(self) -> object:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("its data.pkl takes a value that is not there")
        return self.stack.pop()

    def _to_mark(self) -> list[object]:
        if not self.marks:
            raise ValueError("its data.pkl takes a value that is not there")
        place = self.marks.pop()
        held = self.stack[place:]
        del self.stack[place:]
        return held

    def _mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise ValueError("its data.pkl nests or stacks too many values")
        self.marks.append(len(self.stack))

    def _protocol(self) -> None:
        version = self._number(1)
        if version not in (2, 3):
            raise ValueError(f"its data.pkl has protocol {version}; torch.save writes 2")

    def _global(self) -> None:
        end = self.pickle.find(b"\n", self.at, self.at + MAX_TEXT)
        last = self.pickle.find(b"\n", end + 1, end + MAX_TEXT) if end >= 0 else -1
        if last < 0:
            raise ValueError("its data.pkl is cut off")
        name = self.pickle[self.at : last].decode("utf-8", "backslashreplace").replace("\n", " ")
        self.at = last + 1
        if name not in NAMES:
            dotted = name.replace(" ", ".")[:80]
            raise ValueError(f"its data.pkl names {dotted!r}, which no state dict has; nothing was run")
        self.stack.append(NAMES[name])

    def _text(self) -> None:
        length = self._number(4)
        if length > MAX_TEXT:
            raise ValueError(f"its data.pkl holds a text of {length} bytes; at most {MAX_TEXT} are read")
        self.stack.append(self._bytes(length).decode("utf-8", "backslashreplace"))

    def _long(self) -> None:
        length = self._number(1)
        if length > 8:
            raise ValueError(f"its data.pkl holds a number of {length} bytes")
        self.stack.append(self._number(length, signed=True))

    def _put(self, width: int) -> None:
        held = self._pop()
        self.stack.append(held)
        self.memo[self._number(width)] = held

    def _get(self, width: int) -> None:
        key = self._number(width)
        if key not in self.memo:
            raise ValueError("its data.pkl recalls a value that it never kept")
        self.stack.append(self.memo[key])

    def _tuple(self, count: int) -> None:
        place = len(self.stack) - count
        if place < (self.marks[-1] if self.marks else 0):
            raise ValueError("its data.pkl takes a value that is not there")
        self.stack[place:] = [tuple(self.stack[place:])]

    def _set(self, items: list[object]) -> None:
        held = self._pop()
        if not isinstance(held, dict) or len(items) % 2:
            raise ValueError("its data.pkl fills what is no dictionary")
        for name, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(name, str):
                raise ValueError(f"its data.pkl has a key that is no text ({type(name).__name__})")
            if name in held:
                raise ValueError(f"its data.pkl names {name[:80]!r} twice")
            held[name] = value
        self.stack.append(held)

    def _set_one(self) -> None:
        value, name = self._pop(), self._pop()
        self._set([name, value])

    def _build(self) -> None:
        """Discards the attributes of a dictionary: modules keep versions there (``_metadata``), which change no
        tensor.
        """
        state, held = self._pop(), self._pop()
        if not isinstance(state, dict) or not isinstance(held, dict):
            raise ValueError("its data.pkl gives attributes to what is no dictionary")
        self.stack.append(held)

    def _storage(self) -> None:
        match self._pop():
            case ("storage", PickleName("storage", dtype), str(key), str(), int(count)) if 0 <= count < MAX_SIZE:
                self.stack.append(Storage(dtype, key, count))
            case _:
                raise ValueError("its data.pkl refers to what is no storage")

    def _call(self) -> None:
        given, called = self._pop(), self._pop()
        make = self.CALLS.get(called.kind) if isinstance(called, PickleName) else None
        if make is None or type(given) is not tuple:
            raise ValueError("its data.pkl calls what is no tensor, parameter or dictionary; nothing was run")
        self.stack.append(make(given))

    CALLS: ClassVar[dict[str, Callable[[tuple[object, ...]], object]]]
    STEPS: ClassVar[dict[int, Callable[[PickleProgram], None]]]


def _dictionary(given: tuple[object, ...]) -> dict[str, object]:
    if given:
        raise ValueError("its data.pkl makes a dictionary of values")
    return {}


def _tensor(given: tuple[object, ...]) -> StoredTensor:
    """Builds a tensor from (storage, offset, size, strides, requires_grad, hooks[, metadata])."""
    match given:
        case (Storage(str(dtype)) as storage, offset, shape, strides, bool(), dict() as hooks, *rest) if (
            dtype and not hooks and rest in ([], [None])
        ):
            return _view(storage, dtype, offset, shape, strides)
        case _:
            raise ValueError("its data.pkl makes a tensor of what is none, or one with hooks or metadata")


def _typed_tensor(given: tuple[object, ...]) -> StoredTensor:
    """Builds a tensor from (storage, offset, size, strides, requires_grad, hooks, type[, metadata])."""
    match given:
        case (
            Storage("") as storage,
            offset,
            shape,
            strides,
            bool(),
            dict() as hooks,
            PickleName("type", dtype),
            *rest,
        ) if not hooks and rest in ([], [None]):
            return _view(storage, dtype, offset, shape, strides)
        case _:
            raise ValueError("its data.pkl makes a tensor of what is none, or one with hooks or metadata")


def _view(storage: Storage, dtype: str, offset: Any, shape: object, strides: object) -> StoredTensor:
    """Checks types and signs.

    That the view lies inside its storage is checked later, when the dtype's width is known.
    """
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides) or len(shape) > MAX_DIMS:
        raise ValueError("its data.pkl has a tensor whose shape and strides do not fit")
    if any(type(n) is not int or not 0 <= n < MAX_SIZE for n in (offset, *shape, *strides)):
        raise ValueError("its data.pkl has a tensor whose shape, strides or offset are out of range")
    if math.prod(n for n in shape if n) >= MAX_SIZE:
        raise ValueError("its data.pkl has a tensor whose shape is out of range")
    return StoredTensor(storage, dtype, offset, shape, strides)


def _parameter(given: tuple[object, ...]) -> StoredTensor:
    """Unwraps the tensor from (tensor, requires_grad, hooks)."""
    match given:
        case (StoredTensor() as tensor, bool(), dict() as hooks) if not hooks:
            return tensor
        case _:
            raise ValueError("its data.pkl makes a parameter of what is no tensor, or one with hooks")


def _opcode(code: int) -> str:
    import pickletools

    return next((o.name for o in pickletools.opcodes if o.code == chr(code)), f"0x{code:02x}")


def _push(make: Callable[[PickleProgram], object]) -> Callable[[PickleProgram], None]:
    return lambda p: p.stack.append(make(p))


PickleProgram.CALLS = {
    "dictionary": _dictionary,
    "tensor": _tensor,
    "typed tensor": _typed_tensor,
    "parameter": _parameter,
}
PickleProgram.STEPS = {
    ord(code): step
    for code, step in {
        "\x80": PickleProgram._protocol,
        "c": PickleProgram._global,
        "X": PickleProgram._text,
        "K": _push(lambda p: p._number(1)),
        "M": _push(lambda p: p._number(2)),
        "J": _push(lambda p: p._number(4, signed=True)),
        "\x8a": PickleProgram._long,
        "N": _push(lambda p: None),
        "\x88": _push(lambda p: True),
        "\x89": _push(lambda p: False),
        "}": _push(lambda p: {}),
        ")": _push(lambda p: ()),
        "(": PickleProgram._mark,
        "t": _push(lambda p: tuple(p._to_mark())),
        "\x85": lambda p: p._tuple(1),
        "\x86": lambda p: p._tuple(2),
        "\x87": lambda p: p._tuple(3),
        "q": lambda p: p._put(1),
        "r": lambda p: p._put(4),
        "h": lambda p: p._get(1),
        "j": lambda p: p._get(4),
        "s": PickleProgram._set_one,
        "u": lambda p: p._set(p._to_mark()),
        "b": PickleProgram._build,
        "Q": PickleProgram._storage,
        "R": PickleProgram._call,
    }.items()
}
