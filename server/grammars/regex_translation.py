"""Translates regular expressions of users (Python's ``re``, ECMAScript) for llguidance.

The result matches a subset of what either dialect matches: ``\\w`` and ``\\d`` are ASCII, and what they exclude is
excluded in Unicode. Lazy quantifiers become greedy ones, which match the same texts. Constructs that a finite automaton
cannot decide are refused by name.
"""

from __future__ import annotations

import re

from trencadis.core.errors import BadRequest

_OUTSIDE = {
    "d": "[0-9]",
    "D": r"[^\p{Nd}]",
    "w": "[0-9A-Za-z_]",
    "W": r"[^\w\p{N}]",
    "s": r"[ \t\n\r\f\v]",
    "S": r"[^\s\x{1c}-\x{1f}\x{feff}]",
    "A": "^",
    "Z": "$",
    "z": "$",
}
_INSIDE = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\f\v", "b": r"\x{8}"} | {k: _OUTSIDE[k] for k in "DWS"}
_EXCLUDED = {
    "d": r"\p{Nd}",
    "D": "[^0-9]",
    "w": r"\w\p{N}",
    "W": "[^0-9A-Za-z_]",
    "s": r"\s\x{1c}-\x{1f}\x{feff}",
    "S": r"[^ \t\n\r\f\v]",
    "b": r"\x{8}",
}
"""Meaning of escapes in a negated class: all characters that any dialect includes."""
_SAME = "nrtfva"
_REFUSED = {"b": "word boundaries", "B": "word boundaries", "k": "backreferences", "G": "\\G", "R": "\\R", "X": "\\X"}
_GROUPS = {
    "=": "lookahead",
    "!": "lookahead",
    "<=": "lookbehind",
    "<!": "lookbehind",
    ">": "atomic groups",
    "P=": "backreferences",
    "(": "conditions",
    "P>": "recursion",
    "R": "recursion",
}
_BOUNDS = re.compile(r"\{([0-9]{0,6})(,?)([0-9]{0,6})\}")
_NAMED = re.compile(r"\?P?<[A-Za-z_]\w*>")
_FLAGS = re.compile(r"\?([ims]*)(-[ims]+)?([:)])")
_HEX = re.compile(r"\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"[pP](?:[LMNPSZC]|\{\^?[A-Za-z_=\-]{1,40}\})")
_META = frozenset("\\.+*?()|[]{}^$#&-~/")


def literal(character: str) -> str:
    """Returns the regex of one character."""
    if character in _META:
        return "\\" + character
    return f"\\x{{{ord(character):x}}}" if ord(character) < 32 or ord(character) == 127 else character


def escaped(text: str) -> str:
    """Returns the regex of a text."""
    return "".join(map(literal, text))


def translate_regex(pattern: str, param: str) -> str:
    """Returns ``pattern`` in llguidance's syntax, ready to be put between two slashes.

    Raises:
        BadRequest: it is no regex, or needs more than an automaton; the error has ``param``.
    """
    return _RegexReader(pattern, param).run()


class _RegexReader:
    def __init__(self, pattern: str, param: str) -> None:
        self.text, self.param, self.at = pattern, param, 0
        self.out: list[str] = []

    def make_error(self, what: str) -> BadRequest:
        return BadRequest(f"The regex at {self.param[:60]} {what} (character {self.at}).", param=self.param)

    def run(self) -> str:
        repeats = False
        while self.at < len(self.text):
            head = self.text[self.at]
            if head in "*+?{" and (bounds := self._read_quantifier(head)):
                if repeats or not self.out:
                    raise self.make_error("repeats a repetition, or nothing")
                self.out.append(bounds)
                repeats = True
                continue
            repeats = False
            self.at += 1
            if head == "\\":
                self.out.append(self._read_escape(_OUTSIDE))
            elif head == "[":
                self.out.append(self._read_class())
            elif head == "(":
                self.out.append(self._read_group())
            elif head in ")|^$.":
                self.out.append(head)
            else:
                self.out.append(literal(head))
        return "".join(self.out)

    def _read_quantifier(self, head: str) -> str:
        """Reads the next quantifier, without a mark of laziness; "" if a brace is a plain character."""
        if head != "{":
            self.at += 1
            found = head
        else:
            match = _BOUNDS.match(self.text, self.at)
            if match is None or not any(match.groups()):
                return ""
            least, comma, most = match.groups()
            self.at = match.end()
            found = f"{{{least or 0}{comma}{most}}}"
        follows = self.text[self.at : self.at + 1]
        if follows == "+":
            raise self.make_error("uses possessive quantifiers, which are not supported")
        self.at += follows == "?"
        return found

    def _read_group(self) -> str:
        if self.text[self.at : self.at + 1] != "?":
            return "("
        named = _NAMED.match(self.text, self.at)
        if named:
            self.at = named.end()
            return "("
        if self.text.startswith("?#", self.at):
            end = self.text.find(")", self.at)
            if end < 0:
                raise self.make_error("has an open comment")
            self.at = end + 1
            return "(?:)"
        flags = _FLAGS.match(self.text, self.at)
        if flags:
            self.at = flags.end()
            return "(" + flags[0]
        for mark, what in _GROUPS.items():
            if self.text.startswith(mark, self.at + 1):
                raise self.make_error(f"uses {what}, which is not supported")
        raise self.make_error("has an unknown kind of group")

    def _read_escape(self, classes: dict[str, str]) -> str:
        """Translates the escape after a backslash."""
        head = self.text[self.at : self.at + 1]
        if not head:
            raise self.make_error("ends with a backslash")
        if head in classes:
            self.at += 1
            return classes[head]
        if head in _SAME:
            self.at += 1
            return "\\" + head
        if head in "xuU":
            return self._read_code_point(head)
        if head in "pP":
            match = _PROPERTY.match(self.text, self.at)
            if match is None:
                raise self.make_error("names no class of characters behind \\p")
            self.at = match.end()
            return "\\" + match[0]
        if head == "c" and self.text[self.at + 1 : self.at + 2].isalpha():
            code = ord(self.text[self.at + 1]) & 31
            self.at += 2
            return f"\\x{{{code:x}}}"
        if head == "0" and not self.text[self.at + 1 : self.at + 2].isdigit():
            self.at += 1
            return "\\x{0}"
        if head in "123456789":
            raise self.make_error("uses backreferences, which is not supported")
        if head.isalnum():
            raise self.make_error(f"uses {_REFUSED.get(head, 'an unknown escape')}, which is not supported")
        self.at += 1
        return literal(head)

    def _read_code_point(self, kind: str) -> str:
        """Reads a character by its number; a pair of surrogates is one character."""
        braced = _HEX.match(self.text, self.at + 1)
        if braced:
            self.at = braced.end()
            code = int(braced[1], 16)
        else:
            code = self._read_hex_digits({"x": 2, "u": 4, "U": 8}[kind])
            if 0xD800 <= code < 0xDC00 and self.text.startswith("\\u", self.at):
                self.at += 1
                code = 0x10000 + ((code - 0xD800) << 10) + (self._read_hex_digits(4) - 0xDC00)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self.make_error("names a character that does not exist")
        return f"\\x{{{code:x}}}"

    def _read_hex_digits(self, count: int) -> int:
        found = self.text[self.at + 1 : self.at + 1 + count]
        if len(found) < count or not all(c in "0123456789abcdefABCDEF" for c in found):
            raise self.make_error("has an incomplete escape")
        self.at += 1 + count
        return int(found, 16)

    def _read_class(self) -> str:
        """Translates a character class, starting after its bracket."""
        out = ["["]
        members = _INSIDE
        if self.text.startswith("^", self.at):
            out.append("^")
            self.at += 1
            members = _EXCLUDED
        first = True
        while True:
            head = self.text[self.at : self.at + 1]
            self.at += 1
            if not head:
                raise self.make_error("has an open class")
            if head == "]" and not first:
                return "".join((*out, "]"))
            first = False
            if head == "\\":
                out.append(self._read_escape(members))
            elif head == "-" and out[-1] not in ("[", "^", "-"):
                out.append("-" if self.text[self.at : self.at + 1] != "]" else "\\-")
            else:
                out.append(literal(head))
