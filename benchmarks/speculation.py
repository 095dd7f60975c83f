"""Tokens a second with and without drafts, on scripted answers.

python -m benchmarks.speculation MODEL [--dtype auto] [--quantization ""] [--loads prediction,editing,...] [--pairs 10]
                                 [--drafts 4] [--out 128] [--device cpu] [--json FILE]

A model with random weights repeats nothing, so that its answers are scripted: after each launch the drawn ids are
replaced by those of the script, in the sampler's state too; the cost of that is part of both sides. One engine answers
each load by turns without and with drafts, and the median of the ratios is reported; ``cpu ratio`` is that of tokens
a CPU second of this process, which other processes on the machine disturb less.

| load | prompt and answer |
|---|---|
| prediction | the request predicts the answer with every tenth id changed; at ``--predicted`` requests at a time |
| editing | the answer is the prompt's text with 5 % of its ids changed |
| plain | random ids, which repeat nothing; at 1, 8 and 32 requests at a time |
| prose | words of the documentation, with what prose repeats by chance; the same numbers of requests |
| json | a schema with long names of fields, without a script: ids that the grammar forces join a launch, or do not |

On a card the next step may have begun before ids are replaced, and then reads others than the script's: its answer is
replaced too, so that only what is computed differs, not how much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.reporting import report, table
from trencadis.core.engine.engine import Engine
from trencadis.core.engine_config import EngineConfig
from trencadis.core.output_constraints import Rule
from trencadis.core.request import Request, SamplingParams
from trencadis.core.scheduling.draft_scheduler import DraftScheduler
from trencadis.core.spec.spec_config import SpeculationConfig
from trencadis.core.step import Step
from trencadis.core.step_output import StepOutput

ROOT = Path(__file__).resolve().parent.parent
HEADER = ("load", "requests", "without", "with", "ratio", "low", "high", "cpu ratio", "tokens a step", "accepted")
LOADS = ("prediction", "editing", "plain", "prose", "json")
NAMES = (
    "identifier_of_the_invoice", "date_of_the_delivery", "address_of_the_customer", "number_of_delivered_articles",
    "total_amount_before_taxes", "currency_of_the_payment", "name_of_the_responsible_clerk", "remarks_of_the_carrier",
)  # fmt: skip
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False}, "type": "object", "required": list(NAMES),
    "additionalProperties": False,
    "properties": {
        name: {"type": "integer", "minimum": 0, "maximum": 9999} if at % 2 else {"type": "string", "maxLength": 12}
        for at, name in enumerate(NAMES)
    },
}  # fmt: skip
FIRST = 1000
"""Smallest id of a script: special ids lie elsewhere."""


@dataclass(frozen=True)
class Script:
    """One request: its prompt, the answer that replaces the model's, and its prediction."""

    prompt: list[int]
    answer: list[int]
    prediction: list[int]


def changed(ids: list[int], rng: random.Random, share: float, vocab: int) -> list[int]:
    """The ids with a share of them replaced."""
    return [rng.randrange(FIRST, vocab) if rng.random() < share else one for one in ids]


def prose(count: int, seed: int) -> list[int]:
    """Ids of words and spaces of a part of the documentation, one id for each different word."""
    text = " ".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    words = re.findall(r"\w+|[^\w\s]", text)
    known = {word: FIRST + at for at, word in enumerate(sorted(set(words)))}
    start = random.Random(seed).randrange(len(words) - count)
    return [known[word] for word in words[start : start + count]]


def script_of(load: str, seed: int, length: int, vocab: int) -> Script:
    """One request of a load."""
    rng = random.Random(seed)
    answer = [rng.randrange(FIRST, vocab) for _ in range(length)]
    prompt = [rng.randrange(FIRST, vocab) for _ in range(64)]
    if load == "prediction":
        wrong = [one + 1 if at % 10 == 9 else one for at, one in enumerate(answer)]
        return Script(prompt, answer, wrong)
    if load == "editing":
        return Script([*prompt, *answer], changed(answer, rng, 0.05, vocab), [])
    if load == "json":
        return Script(prompt, [], [])
    if load == "prose":
        text = prose(256 + length, seed)
        return Script(text[:256], text[256:], [])
    return Script(prompt, answer, [])


class Speed(NamedTuple):
    """Tokens a second, and a CPU second of this process."""

    wall: float
    cpu: float


class ScriptedEngine:
    """An engine whose drawn ids are replaced by those of scripts, after each launch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rank: Any = engine.executor._rank  # type: ignore[attr-defined]
        self.waits = engine.info().device == "cpu"
        """False on a card: a write to the sampler's state would wait for the launch in flight."""
        self.answers: dict[str, list[int]] = {}
        submit = engine.executor.submit
        engine.executor.submit = lambda step: _Replaced(self, step, submit(step))  # type: ignore[method-assign]

    def set_vocabulary(self, model: str) -> None:
        """Gives the engine the bytes of the model's ids, for grammars."""
        from trencadis.server.grammars.grammar_cache import GrammarCache
        from trencadis.server.text.checkpoint_tokenizer import Tokenizer

        info, eos = self.engine.info(), self.engine.scheduler.limits.eos
        book = GrammarCache(Tokenizer.from_checkpoint(Path(model)), info.vocab_size, eos)
        self.engine.set_vocabulary(asyncio.run(book.pack_vocabulary()))
        book.close()

    def replace(self, output: StepOutput) -> StepOutput:
        """Writes the scripts' ids over what a step has drawn, also where the next step reads them."""
        if output.head is None:
            return output
        head, state = output.head, self.rank.model.persistent.state
        head.token = head.token.copy()
        step = self.engine.scheduler.in_flight[0]
        rows = {seq.key: at for at, seq in enumerate(step.persistent)}
        rows.update(output.samples)
        for seq in (*step.persistent, *step.scheduled) if any(self.answers.values()) else ():
            row, answer = rows.get(seq.key), self.answers[seq.request.id]
            if row is None:
                continue
            at = seq.count_known() - seq.prompt
            for place in range(len(seq.drafts) + 1):
                if at + place < len(answer):
                    head.token[row + place] = answer[at + place]
            if self.waits:
                state.last[seq.slot] = int(head.token[row])
        return output

    def answer(self, scripts: list[Script], rule: Rule | None = None, length: int = 0) -> Speed:
        """The speed of all scripts at a time, from the first token on; ``length``: of answers without a script."""
        engine, ended, start, tokens, cpu = self.engine, 0, 0.0, 0, 0.0
        for number, script in enumerate(scripts):
            name = f"{time.monotonic_ns()}-{number}"
            self.answers[name] = script.answer
            most = len(script.answer) or length
            params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=rule is None)
            engine.add(Request(name, script.prompt, params, prediction=script.prediction, rule=rule))
        while ended < len(scripts):
            for delta in engine.step():
                tokens += len(delta.tokens) if start else 0
                ended += delta.finish is not None
            if not start and all(seq.outputs for seq in engine.scheduler.running) and not engine.scheduler.waiting:
                start, cpu = time.perf_counter(), time.process_time()
        self.answers.clear()
        return Speed(tokens / (time.perf_counter() - start), tokens / (time.process_time() - cpu))


@dataclass
class _Replaced:
    """A step's result with the scripts' ids."""

    engine: ScriptedEngine
    step: Step
    pending: Any

    def done(self) -> bool:
        done: bool = self.pending.done()
        return done

    def result(self) -> StepOutput:
        return self.engine.replace(self.pending.result())


def measure(scripted: ScriptedEngine, load: str, requests: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the report."""
    engine = scripted.engine
    scheduler, vocab = engine.scheduler, engine.info().vocab_size
    drafting = of_flags = scheduler.drafting
    assert isinstance(drafting, DraftScheduler)
    without: DraftScheduler | None = None
    rule = None
    if load == "json":
        import llguidance

        rule = Rule(grammar=llguidance.LLMatcher.grammar_from_json_schema(SCHEMA))
        both = (SpeculationConfig("", 0, forced=forced) for forced in (0, 32))
        without, drafting = (DraftScheduler(one, scheduler.limits, scheduler.totals) for one in both)
    sides: dict[bool, list[Speed]] = {False: [], True: []}
    steps = tokens = accepted = drafted = 0
    for pair in range(args.pairs + 1):
        scripts = [script_of(load, 1000 * pair + i, args.out, vocab) for i in range(requests)]
        for drafts in (True, False) if pair % 2 else (False, True):
            scheduler.drafting = drafting if drafts else without
            engine.reset_prefix_cache()
            totals = scheduler.totals
            before = scheduler.steps, totals.spec_accepted, totals.spec_draft_tokens, totals.generation_tokens
            speed = scripted.answer(scripts, rule, args.out)
            if pair:
                sides[drafts].append(speed)
                if drafts:
                    steps += scheduler.steps - before[0]
                    tokens += scheduler.totals.generation_tokens - before[3]
                    accepted += scheduler.totals.spec_accepted - before[1]
                    drafted += scheduler.totals.spec_draft_tokens - before[2]
    scheduler.drafting = of_flags
    pairs = list(zip(sides[False], sides[True], strict=True))
    ratios = sorted(b.wall / a.wall for a, b in pairs)
    return {
        "load": load, "requests": requests, "without": round(statistics.median(s.wall for s in sides[False]), 2),
        "with": round(statistics.median(s.wall for s in sides[True]), 2), "ratio": round(statistics.median(ratios), 3),
        "low": round(ratios[0], 3), "high": round(ratios[-1], 3),
        "cpu ratio": round(statistics.median(b.cpu / a.cpu for a, b in pairs), 3),
        "tokens a step": round(tokens / max(steps, 1), 2),
        "accepted": f"{accepted} of {drafted}",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--requests", default="1,8,32", help="numbers of requests at a time of plain and prose")
    parser.add_argument("--predicted", default="1", help="numbers of requests at a time of prediction")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policy", default="", help="a test policy of the device: twin")
    parser.add_argument("--json", type=Path, help="file that gets the rows")
    args = parser.parse_args()
    from trencadis.core.engine.engine_builder import create_engine

    at_a_time = {"plain": args.requests, "prose": args.requests, "prediction": args.predicted}
    counts = {load: [int(one) for one in at_a_time.get(load, "1").split(",")] for load in args.loads.split(",")}
    config = EngineConfig(
        model=args.model, device=args.device, dtype=args.dtype, quantization=args.quantization, max_model_len=1024,
        max_num_seqs=max(32, *(one for some in counts.values() for one in some)), spec_method=args.method,
        spec_tokens=args.drafts, encoder_cache_images=2, policy=args.policy,
        warmup="skip" if args.policy else EngineConfig().warmup,
    )  # fmt: skip
    scripted = ScriptedEngine(create_engine(config))
    if "json" in counts:
        scripted.set_vocabulary(args.model)
    rows = []
    for load, some in counts.items():
        for requests in some:
            rows.append(measure(scripted, load, requests, args))
            print(rows[-1], flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps({"rows": rows}))
    report("speculation", {"rows": rows}, table(HEADER, [[row[name] for name in HEADER] for row in rows]))
    scripted.engine.close()


if __name__ == "__main__":
    main()
