"""A checkpoint's tokenizer over the ``tokenizers`` library. Torch-free; transformers only where there is no file.

Two tokenizers stand behind one object. The *raw* one reads special tokens wherever their text appears. The *marked* one
is a copy whose special tokens are renamed to marks that hold a secret of this process, so that a special token which a
user types is plain text, while the template's own, rendered as marks, are tokens. The same goes for added tokens that
are not special (``<tool_call>``) where the template uses them (``claim``). Either way the whole text is encoded in one
pass: splitting a text at its special tokens would change neighbouring merges.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RawTokenizer

from trencadis.core.checkpoint.fields import read_json
from trencadis.core.errors import StartupError
from trencadis.server.text.encoding import ids_of, kept
from trencadis.server.text.pieces import Pieces

MARKUP = re.compile(r"[\s▁]*[<\[{].*[^\W\d_].*[>\]}][\s▁]*", re.DOTALL)
"""Added tokens that stand for structure; others are runs of blanks and words, which users write too."""
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
SHORT = 1024
"""Tokens that are read in well under a millisecond."""


class Tokenizer:
    """Text to ids and back.

    Args:
        spec: the parsed tokenizer.json.
        named: special tokens by role, such as ``{"eos_token": "<|im_end|>"}``.
    """

    def __init__(self, spec: dict[str, Any], named: dict[str, str] | None = None) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._copy: Any = None
        self._raw: RawTokenizer = RawTokenizer.from_str(json.dumps(spec))
        self._raw.no_truncation()
        self._raw.no_padding()
        self.nonce = secrets.token_hex(12)
        self.named = named or {}
        self.added: dict[str, int] = {t["content"]: t["id"] for t in spec.get("added_tokens") or []}
        self.special: dict[str, int] = {t["content"]: t["id"] for t in spec.get("added_tokens") or [] if t["special"]}
        self.special_ids = frozenset(self.special.values())
        self.marks: dict[str, str] = {text: self._mark(token) for text, token in self.special.items()}
        self.pieces = Pieces(self._raw, spec, self.special_ids)

    @classmethod
    def from_checkpoint(cls, path: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and special_tokens_map.json of a folder.

        Raises:
            StartupError: the folder holds no tokenizer that can be read.
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
            return cls(spec, named)
        except Exception as error:  # the library raises bare Exception for a bad file
            raise StartupError(f"{path}/tokenizer.json cannot be read: {str(error)[:120]}") from None

    @property
    def vocab_size(self) -> int:
        """Ids that have a text; a checkpoint's embedding may be larger."""
        return int(self._raw.get_vocab_size(with_added_tokens=True))

    @property
    def eos(self) -> int | None:
        """The id of ``eos_token``, where the checkpoint names one."""
        return self.token_id(self.named["eos_token"]) if "eos_token" in self.named else None

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact text in the vocabulary."""
        found = self._raw.token_to_id(token)
        return None if found is None else int(found)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's text of an id (byte-level alphabet where the model uses one)."""
        found = self._raw.id_to_token(token_id)
        return None if found is None else str(found)

    def encode(self, text: str, allow_special: bool = True, add_special_tokens: bool = False) -> list[int]:
        """Ids of ``text``. Special tokens in it are read as such only with ``allow_special``.

        ``add_special_tokens`` also applies the post-processor (a BOS, where the checkpoint has one).
        """
        if not allow_special:
            return self.encode_marked(self.scrub(text))
        return ids_of(self._raw, text, add_special_tokens)

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a text whose special tokens are marks (``mark``); the special tokens' own texts are plain."""
        return ids_of(self._marked, text)

    def kept(self, text: str, most: int, check: Callable[[], None], marked: bool = False) -> tuple[str, int]:
        """See ``encoding.kept``. A mark is one token to the marked copy alone."""
        return kept(self._marked if marked else self._raw, text, most, check)

    def mark(self, text: str) -> str:
        """``text`` (the operator's: a template, a placeholder) with every special or claimed token as its mark."""
        for special in sorted(filter(None, self.marks), key=len, reverse=True):
            text = text.replace(special, self.marks[special])
        return text

    def unmark(self, text: str) -> str:
        """The readable form of a marked text."""
        if self.nonce not in text:
            return text
        for special, mark in self.marks.items():
            text = text.replace(mark, special)
        return text

    def claim(self, source: str) -> None:
        """Marks the added tokens that the operator's template ``source`` names, so that typed ones are text."""
        found = {t: self._mark(i) for t, i in self.added.items() if t not in self.marks and t in source}
        found = {t: mark for t, mark in found.items() if MARKUP.fullmatch(t)}
        if found:
            with self._lock:
                self.marks |= found
                self._copy = None

    def scrub(self, text: str) -> str:
        """A user's text without this process's nonce. Repeats, because a removal may join the halves of another."""
        while self.nonce in text:
            text = text.replace(self.nonce, "")
        return text

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``tokens``; ids without a text vanish."""
        if len(tokens) <= SHORT:
            return str(self._raw.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        # Only a batch is read without the interpreter's lock.
        return str(self._raw.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)[0])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text (its own name for a special one)."""
        return self.pieces.bytes_of(token)

    def warm(self) -> None:
        """Builds the marked copy now rather than at the first chat request."""
        self._marked.encode("a", add_special_tokens=False)

    def _mark(self, token: int) -> str:
        return f"<|{self.nonce}.{token}|>"

    @property
    def _marked(self) -> Any:
        with self._lock:
            if self._copy is None:
                spec = self._spec or json.loads(self._raw.to_str())
                self._copy = RawTokenizer.from_str(json.dumps(_renamed(spec, self.marks)))
                self._copy.no_truncation()
                self._copy.no_padding()
                self._spec = {}
            return self._copy


def _renamed(spec: dict[str, Any], marks: dict[str, str]) -> dict[str, Any]:
    """The tokenizer with marked tokens renamed, in the added tokens and, where they stand there too, the vocabulary.

    The post-processor names special tokens by text and is not used for marked texts, so it is left out. Merges that
    make a marked token are left out too: its text would become the token through them.
    """
    added = [{**t, "content": marks.get(t["content"], t["content"])} for t in spec.get("added_tokens") or []]
    model = dict(spec["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        renamed = {text for text in marks if text in vocab}
        if renamed and model.get("merges"):
            model["merges"] = [m for m in model["merges"] if renamed.isdisjoint(_parts(m))]
        model["vocab"] = {marks.get(text, text): token for text, token in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[marks.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in marks:
        model["unk_token"] = marks[model["unk_token"]]
    return {**spec, "added_tokens": added, "model": model, "post_processor": None}


def _parts(merge: Any) -> tuple[str, str, str]:
    """The two texts that a merge joins, and their union; older files write them as one text."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


def _make_special(spec: dict[str, Any], texts: Sequence[str]) -> None:
    """A token with a role is special whatever its entry says, and an added token where it had no entry."""
    entries = {t["content"]: t for t in spec.get("added_tokens") or []}
    vocab = spec.get("model", {}).get("vocab")
    for text in texts:
        if text in entries:
            entries[text]["special"] = True
        elif isinstance(vocab, dict) and text in vocab:
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            entries[text] = {"id": vocab[text], "content": text, **flags}
            spec.setdefault("added_tokens", []).append(entries[text])


def _add_missing(spec: dict[str, Any], decoder: dict[str, Any]) -> None:
    """Adds the tokens that only tokenizer_config.json lists (older checkpoints)."""
    known = {t["content"] for t in spec.get("added_tokens") or []}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        if isinstance(entry, dict) and entry.get("content") and entry["content"] not in known:
            item = {"id": int(token), "content": entry["content"], **{f: bool(entry.get(f)) for f in flags}}
            spec.setdefault("added_tokens", []).append(item)


def _convert(path: Path) -> dict[str, Any]:
    """The fast tokenizer that transformers makes of older files (vocab.json and merges.txt, tokenizer.model)."""
    files = ("vocab.json", "tokenizer.model", "merges.txt", "vocab.txt")
    if not any((path / name).is_file() for name in files):
        raise StartupError(f"{path} holds no tokenizer.json; the checkpoint is incomplete")
    if not any((path / name).is_file() for name in files if name != "tokenizer.model") and not _reads_sentencepiece():
        raise StartupError(
            f"{path} holds tokenizer.model and no tokenizer.json; reading it takes pip install sentencepiece protobuf, "
            "or name a folder with a tokenizer.json by --tokenizer"
        )
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(path), use_fast=True)
        spec: dict[str, Any] = json.loads(slow.backend_tokenizer.to_str())
        return spec
    except Exception as error:
        raise StartupError(f"{path} holds no tokenizer.json and cannot be converted: {str(error)[:100]}") from None


def _reads_sentencepiece() -> bool:
    """Whether transformers can convert such a model; without these two its error blames another library."""
    return all(find_spec(name) is not None for name in ("sentencepiece", "google")) and (
        find_spec("google.protobuf") is not None
    )
