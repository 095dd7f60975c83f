"""A checkpoint's tokenizer, on the ``tokenizers`` library. Torch-free; imports transformers only without a file.

Each object holds two tokenizers over one vocabulary. The *raw* one reads special tokens wherever their text appears;
the *marked* one has other names for special tokens, marks that contain a secret of this process: a special token that a
user types is plain text, while those of the template, rendered as marks, are tokens. The same holds for added tokens
that are not special (``<tool_call>``) if the template uses them (``claim``). Either encodes the whole text in one pass,
because splitting a text at its special tokens would change neighbouring merges.

A tokenizer is made for whole texts: it may put a blank before them, compose their characters or lower their case. Ids
of text that a grammar forces in the middle of an answer must spell those bytes and no others; ``make_verbatim`` makes a
tokenizer for them.

Texts of any length are first bounded, then encoded in one pass, without the interpreter's lock. The library releases
the lock only for batches, so a text is a batch of one. It takes the lock again to free its results, about 0.1 us a
token, so a text of far too many tokens must be recognized piece by piece.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from trencadis.core.checkpoint.json_fields import read_json
from trencadis.core.errors import StartupError
from trencadis.core.json_types import Json, JsonObject
from trencadis.server.text.template_sandbox import unmark_text

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def make_byte_alphabet() -> dict[str, int]:
    """Returns the characters that stand for bytes in a byte-level vocabulary: printable Latin-1 as itself, else from
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


def decode_sentencepiece(text: str) -> bytes:
    """Returns the bytes of a SentencePiece token."""
    match = BYTE_TOKEN.match(text)
    return bytes([int(match[1], 16)]) if match else text.replace("▁", " ").encode()


class TokenBytes:
    """The bytes of token ids.

    ``byte_level``: a text is exactly the concatenation of its tokens' bytes (GPT-2, Qwen, Llama 3). Otherwise
    (SentencePiece) the bytes are those of the token alone, which is enough for log-probabilities.
    """

    def __init__(self, raw: RawTokenizer, spec: JsonObject, special: frozenset[int]) -> None:
        self._raw = raw
        self._alphabet = make_byte_alphabet()
        self._special = special
        self.bytes_of: Callable[[int], bytes] = cache(self._bytes)
        """The bytes of one id; empty for an id without a text."""
        self.text_of: Callable[[int], str | None] = cache(self._text)
        """The text of one id; None for a special one, and for bytes that are no whole characters."""
        self.byte_level = (spec.get("decoder") or {}).get("type") == "ByteLevel"

    def _bytes(self, token: int) -> bytes:
        text = self._raw.id_to_token(token)
        if text is None:
            return b""
        if self.byte_level:
            try:
                return bytes(map(self._alphabet.__getitem__, text))
            except KeyError:
                # If an added token has a character outside the alphabet, the library takes the whole token literally.
                return text.encode()
        return text.encode() if token in self._special else decode_sentencepiece(text)

    def _text(self, token: int) -> str | None:
        if token in self._special:
            return None
        try:
            return self.bytes_of(token).decode()
        except UnicodeDecodeError:
            return None

    def is_special(self, token: int) -> bool:
        """Returns True if ``skip_special_tokens`` drops the token."""
        return token in self._special


LONGEST_TOKEN = 512
"""Most characters of any token; a prompt longer than this allows is refused without being tokenized."""
MOST_CHARACTERS = 8 << 20
"""Most characters of a text, unless 16 characters per token of the model's context are more."""
COUNTED = 1 << 17
"""Length in characters from which tokens are counted before encoding."""
PIECE = 1 << 15


def get_max_characters(max_model_len: int) -> int:
    """Returns the most characters of a text; a longer one is refused without being tokenized."""
    return min(max_model_len * LONGEST_TOKEN, max(MOST_CHARACTERS, 16 * max_model_len))


def encode_text(raw: RawTokenizer, text: str, add_special_tokens: bool = False) -> list[int]:
    """Returns the ids of ``text`` from the library's tokenizer ``raw``."""
    return list(raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def find_kept_end(raw: RawTokenizer, text: str, most: int, check: Callable[[], None]) -> tuple[str, int]:
    """Returns the shortest end of ``text`` that may have more than ``most`` tokens, or all of it, and its approximate
    number of tokens.

    Counts tokens piece by piece from the end. Cuts may add or save a few tokens, so ``most`` should be generous.
    """
    count, start = 0, len(text)
    while start > 0 and count <= most:
        check()
        end, start = start, max(0, start - PIECE)
        count += len(raw.encode_batch_fast([text[start:end]], add_special_tokens=False)[0])
    return text[start:], count


KEPT_NORMALIZERS = ("Replace", "ByteLevel")
"""Normalizers that only convert a text to the vocabulary's alphabet."""


def make_verbatim(made: RawTokenizer) -> RawTokenizer:
    """Changes a tokenizer so that its ids spell a text exactly, and returns it."""
    normalizer = _keep_alphabet(_state_of(made.normalizer))
    splitter = _without_blank(_state_of(made.pre_tokenizer))
    parts: JsonObject = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": splitter,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    read = RawTokenizer.from_str(json.dumps(parts))
    for name in ("normalizer", "pre_tokenizer"):
        if (part := getattr(read, name)) is not None or getattr(made, name) is not None:
            setattr(made, name, part)
    return made


def _state_of(part: Any) -> JsonObject | None:
    """Returns the entry of a part in tokenizer.json."""
    return None if part is None else json.loads(part.__getstate__())


def _keep_alphabet(entry: JsonObject | None) -> JsonObject | None:
    """Returns a normalizer without the steps that change a text's characters; None if no step is left."""
    if entry is None:
        return None
    if entry["type"] == "Sequence":
        steps = [step for step in map(_keep_alphabet, entry["normalizers"]) if step is not None]
        return {**entry, "normalizers": steps} if steps else None
    return entry if entry["type"] in KEPT_NORMALIZERS else None


def _without_blank(entry: JsonObject | None) -> JsonObject | None:
    """Returns a pre-tokenizer that puts no blank before a text."""
    if entry is None:
        return None
    if entry["type"] == "Sequence":
        return {**entry, "pretokenizers": [_without_blank(step) for step in entry["pretokenizers"]]}
    changes = {"add_prefix_space": False, "prepend_scheme": "never"}
    return {**entry, **{name: value for name, value in changes.items() if name in entry}}


MARKUP = re.compile(r"[\s▁]*[<\[{].*[^\W\d_].*[>\]}][\s▁]*", re.DOTALL)
"""Added tokens that mark structure; the others are blanks and words, which users write too."""
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Fields of an added token's entry apart from its text and its id."""
SHORT = 1024
"""Number of tokens up to which decoding takes well under a millisecond."""


class Tokenizer:
    """Encodes and decodes text.

    Args:
        spec: the parsed tokenizer.json.
        named: special tokens by role, such as ``{"eos_token": "<|im_end|>"}``.
    """

    def __init__(self, spec: JsonObject, named: dict[str, str] | None = None) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._copy: RawTokenizer | None = None
        self._raw: RawTokenizer = _load_tokenizer(spec)
        self._entries: list[JsonObject] = sorted(spec.get("added_tokens") or [], key=lambda t: int(t["id"]))
        self.nonce = secrets.token_hex(12)
        self.named = named or {}
        self.folder: Path | None = None
        self.added: dict[str, int] = {t["content"]: t["id"] for t in spec.get("added_tokens") or []}
        self.special: dict[str, int] = {t["content"]: t["id"] for t in spec.get("added_tokens") or [] if t["special"]}
        self.special_ids = frozenset(self.special.values())
        self.marks: dict[str, str] = {text: self._mark(token) for text, token in self.special.items()}
        self.pieces = TokenBytes(self._raw, spec, self.special_ids)

    @classmethod
    def from_checkpoint(cls, path: Path) -> Tokenizer:
        """Reads the tokenizer.json, tokenizer_config.json and special_tokens_map.json of a folder.

        Raises:
            StartupError: the folder has no readable tokenizer.
        """
        config = read_json(path / "tokenizer_config.json") or {}
        held = read_json(path / "tokenizer.json")
        spec = _convert(path) if held is None else held
        named = {}
        for source in (read_json(path / "special_tokens_map.json") or {}, config):
            for role in NAMED:
                value = source.get(role)
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    named[role] = text
        try:
            _add_missing(spec, config.get("added_tokens_decoder") or {})
            _make_special(spec, list(named.values()))
            made = cls(spec, named)
            made.folder = path
            return made
        except BaseException as error:  # the library raises bare Exception for a bad file, and panics for some
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise StartupError(f"{path}/tokenizer.json cannot be read: {str(error)[:120]}") from None

    @property
    def raw(self) -> Any:
        """The library's tokenizer, which reads special tokens wherever their text appears; it must not be changed."""
        return self._raw

    @property
    def vocab_size(self) -> int:
        """Number of ids with a text; the embedding of a checkpoint may be larger."""
        return int(self._raw.get_vocab_size(with_added_tokens=True))

    @property
    def eos(self) -> int | None:
        """The id of ``eos_token``, if the checkpoint names one."""
        return self.find_token_id(self.named["eos_token"]) if "eos_token" in self.named else None

    def find_token_id(self, token: str) -> int | None:
        """Returns the id of a token given by its exact text in the vocabulary."""
        found = self._raw.token_to_id(token)
        return None if found is None else int(found)

    def get_token(self, token_id: int) -> str | None:
        """Returns the text of an id in the vocabulary (in the byte-level alphabet, if the model has one)."""
        found = self._raw.id_to_token(token_id)
        return None if found is None else str(found)

    def encode(self, text: str, allow_special: bool = True, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of ``text``. Special tokens in it count as tokens only with ``allow_special``.

        ``add_special_tokens`` also applies the post-processor (a BOS, if the checkpoint has one). A BOS that the text
        itself begins with is not put there twice.
        """
        if not allow_special:
            return self.encode_marked(self.scrub(text))
        ids = encode_text(self._raw, text, add_special_tokens)
        bos = self.named.get("bos_token", "")
        if add_special_tokens and bos and text.startswith(bos) and not text.startswith(2 * bos):
            first = self.find_token_id(bos)
            return ids[1:] if ids[:2] == [first, first] else ids
        return ids

    @property
    def framing(self) -> tuple[list[int], list[int]]:
        """Special ids that the checkpoint puts before and after a prompt."""
        plain, whole = (encode_text(self._raw, "a", add_special_tokens=special) for special in (False, True))
        before = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:before], whole[before + len(plain) :]

    def encode_marked(self, text: str) -> list[int]:
        """Returns the ids of a text whose special tokens are marks (``mark``); typed special tokens are plain text."""
        return encode_text(self._marked, text)

    def find_kept_end(self, text: str, most: int, check: Callable[[], None], marked: bool = False) -> tuple[str, int]:
        """See ``find_kept_end``. Only the marked copy reads a mark as one token."""
        return find_kept_end(self._marked if marked else self._raw, text, most, check)

    def mark(self, text: str) -> str:
        """Replaces every special or claimed token in a text of the operator (template, placeholder) by its mark."""
        for special in sorted(filter(None, self.marks), key=len, reverse=True):
            text = text.replace(special, self.marks[special])
        return text

    def unmark(self, text: str) -> str:
        """The readable form of a marked text."""
        return unmark_text(text, self.nonce, self.marks)

    def claim(self, source: str) -> None:
        """Marks the added tokens that the operator's template ``source`` contains; typed ones are plain text."""
        found = {t: self._mark(i) for t, i in self.added.items() if t not in self.marks and t in source}
        found = {t: mark for t, mark in found.items() if MARKUP.fullmatch(t)}
        if found:
            with self._lock:
                self.marks |= found
                self._copy = None

    def scrub(self, text: str) -> str:
        """Removes this process's nonce from a user's text. Repeats: a removal may join the halves of another nonce."""
        while self.nonce in text:
            text = text.replace(self.nonce, "")
        return text

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ``tokens``; ids without a text add nothing."""
        if len(tokens) <= SHORT:
            return str(self._raw.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        # The library releases the interpreter's lock only for batches.
        return str(self._raw.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0])

    def get_token_bytes(self, token: int) -> bytes:
        """Returns the bytes that a token adds to a text (the name of a special one)."""
        return self.pieces.bytes_of(token)

    def spell_parts(self, hidden: Collection[str]) -> str:
        """Makes a tokenizer.json whose ids, which are those of this tokenizer, spell a part of a text exactly.

        It reads none of the added tokens ``hidden`` in a text, unless the vocabulary of its model holds one of them.
        """
        marks = {text: self._mark(self.added[text]) for text in hidden if text in self.added}
        for names in (marks, {}):
            made = _share_vocabulary(self._raw, self._entries, names)
            if made is not None:
                return str(make_verbatim(made).to_str())
        return str(self._raw.to_str())

    def warm(self) -> None:
        """Builds the marked copy now rather than at the first chat request."""
        self._marked.encode("a", add_special_tokens=False)

    def _mark(self, token: int) -> str:
        return f"<|{self.nonce}.{token}|>"

    @property
    def _marked(self) -> Any:
        copy = self._copy
        return self._make_marked_copy() if copy is None else copy

    def _make_marked_copy(self) -> Any:
        with self._lock:
            if self._copy is None:
                self._copy = self._get_marked()
            return self._copy

    def _get_marked(self) -> Any:
        """Returns the library's tokenizer that reads marks in place of special tokens."""
        copy = _share_vocabulary(self._raw, self._entries, self.marks)
        if copy is None:
            copy = make_marked_copy(self._spec or json.loads(self._raw.to_str()), self.marks)
        self._spec = {}
        return copy


def _load_tokenizer(spec: JsonObject) -> RawTokenizer:
    """Makes the library's tokenizer of a spec, for whole texts."""
    made = RawTokenizer.from_str(json.dumps(spec))
    made.no_truncation()
    made.no_padding()
    return made


def _share_vocabulary(raw: RawTokenizer, entries: Sequence[JsonObject], marks: dict[str, str]) -> RawTokenizer | None:
    """Makes a marked copy that shares the vocabulary of ``raw``; None if it would differ from ``make_marked_copy``.

    Args:
        entries: the added tokens by id.
    """
    made = RawTokenizer(raw.model)
    if any(made.token_to_id(text) is not None for text in marks):
        return None  # merges may make the mark from a user's text
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (held := getattr(raw, part)) is not None:
            setattr(made, part, held)
    texts = [marks.get(text, text) for text in (str(t["content"]) for t in entries)]
    made.add_tokens([AddedToken(x, **{f: bool(t.get(f)) for f in FLAGS}) for x, t in zip(texts, entries, strict=True)])
    same = all(made.token_to_id(x) == t["id"] for x, t in zip(texts, entries, strict=True))
    return made if same else None


def make_marked_copy(spec: JsonObject, marks: dict[str, str]) -> RawTokenizer:
    """Makes the tokenizer of ``spec`` with marks in place of special tokens."""
    return _load_tokenizer(_rename_marked_tokens(spec, marks))


def _rename_marked_tokens(spec: JsonObject, marks: dict[str, str]) -> JsonObject:
    """Renames marked tokens of a tokenizer, in the added tokens and the vocabulary.

    Leaves out the post-processor, which names special tokens by text and serves no marked text, and merges that make a
    marked token, through which its typed text would become the token.
    """
    added = [{**t, "content": marks.get(t["content"], t["content"])} for t in spec.get("added_tokens") or []]
    model = dict(spec["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        renamed = {text for text in marks if text in vocab}
        if renamed and model.get("merges"):
            model["merges"] = [m for m in model["merges"] if renamed.isdisjoint(_split_merge(m))]
        model["vocab"] = {marks.get(text, text): token for text, token in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[marks.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in marks:
        model["unk_token"] = marks[model["unk_token"]]
    return {**spec, "added_tokens": added, "model": model, "post_processor": None}


class _Merge(NamedTuple):
    """The two texts that a merge joins, and the result."""

    left: str
    right: str
    joined: str


def _split_merge(merge: Json) -> _Merge:
    """Reads a merge; older files write the two texts as one."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return _Merge(left, right, left + right)


def _make_special(spec: JsonObject, texts: Sequence[str]) -> None:
    """Makes tokens with a role special, even if their entry says otherwise, and adds an entry if there is none."""
    entries = {t["content"]: t for t in spec.get("added_tokens") or []}
    vocab = spec.get("model", {}).get("vocab")
    for text in texts:
        if text in entries:
            entries[text]["special"] = True
        elif isinstance(vocab, dict) and text in vocab:
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            entries[text] = {"id": vocab[text], "content": text, **flags}
            spec.setdefault("added_tokens", []).append(entries[text])


def _add_missing(spec: JsonObject, decoder: JsonObject) -> None:
    """Adds the tokens that only tokenizer_config.json lists (older checkpoints)."""
    known = {t["content"] for t in spec.get("added_tokens") or []}
    for token, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        if isinstance(entry, dict) and entry.get("content") and entry["content"] not in known:
            item = {"id": int(token), "content": entry["content"], **{f: bool(entry.get(f)) for f in FLAGS}}
            spec.setdefault("added_tokens", []).append(item)


def _convert(path: Path) -> JsonObject:
    """Converts older files (vocab.json and merges.txt, tokenizer.model) by transformers."""
    files = ("vocab.json", "tokenizer.model", "merges.txt", "vocab.txt")
    if not any((path / name).is_file() for name in files):
        raise StartupError(f"{path} has no tokenizer.json; the checkpoint is incomplete")
    if (
        not any((path / name).is_file() for name in files if name != "tokenizer.model")
        and not _can_read_sentencepiece()
    ):
        raise StartupError(
            f"{path} has tokenizer.model but no tokenizer.json; pip install sentencepiece protobuf to "
            "convert it, or name a folder with a tokenizer.json by --tokenizer"
        )
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(path), use_fast=True)
        spec: JsonObject = json.loads(slow.backend_tokenizer.to_str())
        return spec
    except Exception as error:
        raise StartupError(f"{path} has no tokenizer.json, and conversion failed: {str(error)[:100]}") from None


def _can_read_sentencepiece() -> bool:
    """Returns True if the packages with which transformers converts such a model are installed; its error names
    another library.
    """
    return all(find_spec(name) is not None for name in ("sentencepiece", "google")) and (
        find_spec("google.protobuf") is not None
    )
