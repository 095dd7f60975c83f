"""How many schemas of a folder have a grammar, and whether the grammars take what fits and nothing else.

    JSONSCHEMABENCH=maskbench/data python benchmarks/grammars/json_schemas.py [--limit 1000]

A file is a JSON schema, or an object with ``schema`` and ``tests`` (``data`` and ``valid``): MaskBench, which is
JSONSchemaBench with instances. Prints the share of schemas with a grammar, why the others have none, and the shares of
valid instances that are taken and of invalid ones that are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance

from trencadis.core.errors import BadRequest
from trencadis.core.token_masks.grammar_matcher import parser_limits
from trencadis.core.token_masks.grammar_tokenizer_and_vocabulary import open_tokenizer
from trencadis.server.grammars.grammar_cache import find_control_tokens, make_vocabulary
from trencadis.server.grammars.lark_grammar_and_tool_functions import GrammarWriter
from trencadis.server.grammars.response_format import RequestedFormat
from trencadis.server.prompts.answer_grammar import write_content_rule
from trencadis.server.text.checkpoint_tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"


def cases(folder: Path, limit: int) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Names, schemas and instances."""
    for path in sorted(folder.rglob("*.json"))[:limit]:
        held = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(held, dict) and "schema" in held and isinstance(held.get("tests"), list)
        yield path.stem, held["schema"] if whole else held, held["tests"] if whole else []


class SchemaBench:
    """Counts over schemas."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.from_checkpoint(DEMO)
        words = make_vocabulary(tokenizer, tokenizer.vocab_size, [tokenizer.eos or 0])
        special = set(words.special)
        self.control = find_control_tokens(tokenizer)
        self.bytes = {t[0]: i for i, t in enumerate(words.tokens) if len(t) == 1 and i not in special}
        self.library = open_tokenizer(words)
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.seconds: list[float] = []

    def take(self, schema: Any, tests: list[dict[str, Any]]) -> None:
        """Compiles one schema and tries its instances."""
        self.counts["schemas"] += 1
        start = time.perf_counter()
        try:
            writer = GrammarWriter(self.control)
            grammar = writer.write_grammar(write_content_rule(RequestedFormat("json", schema, "schema"), writer))
            matcher = llguidance.LLMatcher(self.library, grammar, log_level=0, limits=parser_limits())
            matcher.compute_bitmask()
            if matcher.is_error():
                raise BadRequest(matcher.get_error())
        except BadRequest as error:
            why = error.message.split("\n")[0]
            self.reasons[re.sub(r"\d+", "N", why.partition(": ")[2] or why)[:70]] += 1
            return
        self.seconds.append(time.perf_counter() - start)
        self.counts["compiled"] += 1
        for test in tests:
            kind = "valid" if test["valid"] else "invalid"
            self.counts[kind] += 1
            text = json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))
            copy = matcher.deep_copy()
            taken = copy.consume_tokens([self.bytes[b] for b in text.encode()]) and copy.is_accepting()
            self.counts[f"{kind} taken"] += taken

    def report(self) -> str:
        """What was counted."""
        c = self.counts
        slow = sorted(self.seconds) or [0.0]
        late = slow[len(slow) * 99 // 100]
        lines = [
            f"{c['compiled']} of {c['schemas']} schemas have a grammar ({c['compiled'] / max(1, c['schemas']):.1%})",
            f"compiled in {1000 * statistics.median(slow):.1f} ms median, {1000 * late:.0f} ms p99",
            f"{c['valid taken']} of {c['valid']} valid instances taken, in the order in which they stand",
            f"{c['invalid taken']} of {c['invalid']} invalid instances taken",
            *(f"  {count:5} refused: {reason}" for reason, count in self.reasons.most_common(15)),
        ]
        return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=os.environ.get("JSONSCHEMABENCH", ""))
    parser.add_argument("--limit", type=int, default=1 << 30, help="most files")
    given = parser.parse_args()
    if not given.folder or not Path(given.folder).is_dir():
        print("name a folder of schemas, or set JSONSCHEMABENCH to one", file=sys.stderr)
        return 2
    bench = SchemaBench()
    for _, schema, tests in cases(Path(given.folder), given.limit):
        bench.take(schema, tests)
    print(bench.report())
    return 0


if __name__ == "__main__":
    sys.exit(main())
