"""The checks of a checkpoint's family, in order: configuration, weights, computed values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, update_wrapper
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trencadis.backends.conformance import program_checks
from trencadis.backends.conformance.answer_checks import ARGMAX, CheckedPrompt, PromptRunner
from trencadis.backends.conformance.backend_under_test import CheckTarget
from trencadis.backends.conformance.check_model import compared_images
from trencadis.backends.conformance.check_model.cpu_reference_model import CpuReferenceModel, tensor_parallel_logits
from trencadis.backends.conformance.check_model.transformers_oracle import TransformersOracle, read_declared_keys
from trencadis.backends.conformance.check_result import CheckFailed, Report, Result, Skipped
from trencadis.backends.conformance.check_suite import run_check
from trencadis.backends.conformance.launch_harness import SEQS
from trencadis.backends.cpu import make_backend
from trencadis.core.checkpoint.checkpoint_weight_source import CheckpointSource
from trencadis.core.checkpoint.config_reader import load_config
from trencadis.core.checkpoint.family import GENERATE
from trencadis.core.checkpoint.model_config import ModelConfig
from trencadis.core.checkpoint.model_registry import family_of
from trencadis.core.checkpoint.pooling_config_reader import pooling_of
from trencadis.core.checkpoint.weight_file_reader import open_weights
from trencadis.core.engine_config import EngineConfig
from trencadis.core.errors import StartupError
from trencadis.core.memory.memory_estimator import MemoryEstimator
from trencadis.core.models.decoder import Decoder

TOLERANCE = 1e-4
"""Largest allowed error, as a share of the largest value; also how close two best logits are at a tie."""

LENGTH, DECODED = 90, 12
RANKS = 2
HEADS = ("score.", "score_dense.")
"""Name prefixes of weights that a model without classes does not use."""


@dataclass
class CheckedModel:
    """A checkpoint folder. ``given``: folder of the user's config.json, which differs if the weights are random."""

    checkpoint: Path
    given: Path
    seed: int = 0
    answers: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    @cached_property
    def config(self) -> ModelConfig:
        try:
            found = load_config(self.checkpoint)
        except StartupError as error:
            raise self._failure(f"config.json is not accepted: {error}") from None
        if found.quant is not None:
            raise Skipped("the weights are quantised: check the 16-bit checkpoint that they were made of")
        if family_of(found.architecture).architectures[found.architecture] == GENERATE:
            return found
        return replace(found, pooling=pooling_of(EngineConfig(str(self.checkpoint)), found))

    @property
    def has_tower(self) -> bool:
        """True if the model has a vision tower; False if its checkpoint is rejected."""
        try:
            return load_config(self.checkpoint).vision is not None
        except StartupError:
            return False

    @cached_property
    def oracle(self) -> TransformersOracle:
        return TransformersOracle(self.checkpoint, self.config.pooling is None)

    @cached_property
    def recomputed(self) -> CpuReferenceModel:
        try:
            return CpuReferenceModel(self.config)
        except StartupError as error:
            raise self._failure(f"the model does not load: {error}") from None

    def _failure(self, reason: str) -> Exception:
        """Returns CheckFailed the first time a reason occurs.

        Later it returns Skipped, with only the reason's beginning.
        """
        reason = reason.replace(str(self.checkpoint), str(self.given))
        first = reason not in self.reported
        self.reported.add(reason)
        return CheckFailed(reason) if first else Skipped(f"{reason.partition(':')[0]}, as said above")

    @cached_property
    def ids(self) -> list[int]:
        return self.random_ids(LENGTH, 0)

    def random_ids(self, length: int, number: int) -> list[int]:
        """Returns random token ids of a prompt."""
        most, rng = self.config.text.vocab, np.random.default_rng([self.seed, number])
        ids = rng.integers(0, most, min(length, self.config.text.max_positions - DECODED))
        pad = self.config.text.pad  # the pad token takes no position
        return [int(i) + 1 if int(i) == pad else int(i) for i in ids]

    def expected_logits(self, ids: list[int], drawn: int = 0) -> Tensor:
        """Returns transformers' logits, float32 [n, vocabulary]; hidden rows of a model without an output head.

        ``drawn``: number of the last ``ids`` that are not part of the prompt.
        """
        prefix = self.prefix(len(ids) - drawn)
        if (prefix, *ids) not in self.answers:
            self.answers[prefix, *ids] = self.oracle.logits(ids, prefix)
        return self.answers[prefix, *ids]

    def prefix(self, prompt: int) -> int:
        """Returns how many tokens of a prompt see each other, for a model that generates; 0: each sees those before
        it.
        """
        return 0 if self.config.text.causal or self.config.pooling is not None else prompt

    @cached_property
    def images(self) -> list[compared_images.ComparedImage]:
        """Test images, with the rows and logits of both sides (``compared_images.compare_images``)."""
        return compared_images.compare_images(self.config, self.checkpoint, self.seed, self.oracle)

    def target(self, policy: str) -> CheckTarget:
        """Returns the CPU backend under a policy, with this checkpoint."""
        assert self.config.text  # reports first any error that prevents the other checks
        return CheckTarget("cpu", make_backend, self.checkpoint, policy=policy, quick=True)


def config_keys(model: CheckedModel) -> str:
    """Every key that transformers' configuration has is used, held to what is implemented, or named as ignored."""
    assert model.config.text  # a refusal is reported once
    held = load_config(model.given)
    known = read_declared_keys(model.given)
    _check_read([key for key in held.unread if key in known], model.given)
    if held.vision is None:
        left_out = {key: value for key, value in known.items() if isinstance(value, bool | int | float | str)}
        try:
            whole = load_config(model.given, overrides={**left_out, **_read_config(model.given)})
        except StartupError as error:
            raise CheckFailed(
                f"transformers' default of a key that config.json leaves out is refused: {error}"
            ) from None
        _check_read([key for key in whole.unread if key in known], model.given)
        if whole.text != held.text:
            raise CheckFailed(
                f"a key that config.json leaves out has another default in transformers: "
                f"{_describe_difference(held, whole)}"
            )
    others = f"; unknown to both: {', '.join(held.unread)}" if held.unread else ""
    return f"{len(known)} keys{others}"


def _read_config(path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return found


def _describe_difference(one: ModelConfig, other: ModelConfig) -> str:
    fields = [name for name in one.text.__dataclass_fields__ if getattr(one.text, name) != getattr(other.text, name)]
    return ", ".join(f"{n} is {getattr(one.text, n)}, there {getattr(other.text, n)}" for n in fields)


def _check_read(unread: list[str], path: Path) -> None:
    if unread:
        raise CheckFailed(
            f"{path / 'config.json'}: the family's parser does not read {', '.join(unread)}, which transformers has; "
            "use it, refuse other values than the neutral one, or name it in Family.ignored"
        )


class RecordingSource(CheckpointSource):
    """A weight source that records which weights layers request."""

    @cached_property
    def requested(self) -> set[str]:
        """Canonical names of the weights that were requested so far."""
        return set()

    def stored_as(self, name: str) -> str:
        """Returns the name of a weight in the checkpoint."""
        return self._stored_as.get(name, name)

    def stored_names(self) -> set[str]:
        """Returns the stored names that have a canonical one."""
        return set(self._stored_as.values())

    def _find(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.requested.add(name)
        return super()._find(name, shape)


def weights(model: CheckedModel) -> str:
    """Each stored weight that transformers has is used, and none is missing."""
    config = model.config
    made, names = _decoder(model), family_of(config.architecture).names
    source = RecordingSource(open_weights(model.checkpoint), names, made.backend, config)
    asked = source.requested
    made.load_from(source)
    if config.text.tied:
        asked.add("lm_head.weight")
    theirs = model.oracle.names
    stored = [name for name, _ in open_weights(model.checkpoint)]
    over = () if config.pooling is None or config.pooling.classes else HEADS
    unused = {source.stored_as(name) for name in set(source.tensors) - asked if not name.startswith(over or "\0")}
    unnamed = set(stored) - source.stored_names()
    left = sorted(name for name in unused | unnamed if name in theirs)
    if left:
        raise CheckFailed(f"{len(left)} stored weights that transformers uses are not: {', '.join(left[:4])}")
    buffers = len(unused | unnamed)
    return f"{len(stored)} weights" + (f"; {buffers} that transformers does not use either" if buffers else "")


def _decoder(model: CheckedModel) -> Decoder:
    found = model.recomputed.model
    if not isinstance(found, Decoder):
        raise Skipped("the family's model is not made of the shared decoder")
    return found


def ledger(model: CheckedModel) -> str:
    """The bytes of weights that the memory plan counts are those of the loaded model."""
    made, config = _decoder(model), model.config
    # A tied table serves as embedding and head, and is stored once.
    shared = made.embedding.nbytes() if config.text.tied and config.pooling is None else 0
    held = made.nbytes() - shared + made.enter.rotary.nbytes()
    held += 0 if config.vision is None else config.vision.tables()
    counted = MemoryEstimator(config, itemsize=4).weights()
    if counted != held:
        raise CheckFailed(f"the plan counts {counted} bytes, the loaded model has {held}")
    return f"{held} bytes"


def parts(model: CheckedModel) -> str:
    """The parts of each layer put out what transformers' do; the first that does not is named."""
    _decoder(model)
    theirs = model.oracle.parts(model.ids, model.config.text.layers, model.prefix(len(model.ids)))
    ours = model.recomputed.parts(model.ids)
    both = [name for name in theirs if name in ours]
    for name in both:
        got, want = ours[name], theirs[name]
        off = _error(got, want)
        if off > TOLERANCE:
            raise CheckFailed(
                f"{name}: off by {off:.2g} of the largest value, the first part that is{_ratio(got, want)}"
            )
    return f"{len(both)} parts"


def _error(got: Tensor, want: Tensor) -> float:
    """Returns the largest error as a share of the largest value; infinite for a NaN or another shape."""
    if got.shape != want.shape:
        return float("inf")
    return float((got - want).abs().max().nan_to_num(float("inf")) / want.abs().max())


def _ratio(got: Tensor, want: Tensor) -> str:
    if got.shape != want.shape:
        return f"; ours has shape {list(got.shape)}, theirs {list(want.shape)}"
    times = float((got * want).sum() / (want * want).sum())
    same = _error(got, want * times) < 1e-3
    return f"; ours is {times:.4g} times theirs" if same else ""


def logits(model: CheckedModel, chunk: int) -> str:
    """Logits, or hidden rows, equal transformers', whether a prompt is computed at once or in chunks."""
    if chunk and not model.config.text.causal:
        raise Skipped("an encoder computes whole prompts")
    got, want = model.recomputed.logits(model.ids, chunk or len(model.ids)), model.expected_logits(model.ids)
    off = _error(got, want)
    if off > TOLERANCE:
        raise CheckFailed(f"off by {off:.2g} of the largest logit, first at position {_first(got, want)}")
    return f"{len(model.ids)} tokens, off by {off:.1g} of the largest logit"


def image_rows(model: CheckedModel) -> str:
    """What stands for an image in a prompt equals transformers'."""
    most = 0.0
    for one, ours, theirs, _ in model.images:
        off = _error(ours, theirs)
        if off > TOLERANCE:
            bad = "" if ours.shape != theirs.shape else f", first at row {_first(ours, theirs)}"
            which = f"an image of {len(one.encoded)} items"
            raise CheckFailed(f"{which}: off by {off:.2g} of the largest value{bad}{_ratio(ours, theirs)}")
        most = max(most, off)
    return f"{len(model.images)} pictures, off by {most:.1g} of the largest value"


def image_logits(model: CheckedModel) -> str:
    """The logits of prompts with an image equal transformers'."""
    most = 0.0
    for one, _, _, ours in model.images:
        theirs = model.oracle.logits(one.ids, model.prefix(len(one.ids)), one.processed)
        off = _error(ours, theirs)
        if off > TOLERANCE:
            raise CheckFailed(f"off by {off:.2g} of the largest logit, first at position {_first(ours, theirs)}")
        most = max(most, off)
    return f"{len(model.images)} prompts, off by {most:.1g} of the largest logit"


def _first(ours: Tensor, theirs: Tensor) -> int:
    """Returns the index of the first row that differs."""
    return int(((ours - theirs).abs().amax(1) > TOLERANCE * theirs.abs().max()).int().argmax())


def tokens(model: CheckedModel, policy: str) -> str:
    """Greedy tokens equal transformers', or diverge where its two best logits are all but tied."""
    _require_generation(model)
    target = model.target(policy)
    # Here the cache is not computed again when an answer outgrows longrope's short table, as an engine would do.
    limit = model.config.text.long_from or 60 + DECODED
    made = [model.random_ids(max(1, min(length, limit - DECODED)), 1 + length) for length in (2, 9, 33, 60)]
    asked = [CheckedPrompt(p, np.tile(np.arange(len(p), dtype=np.int32), (3, 1))) for p in made]
    PromptRunner(model.config, target.backend(), 16).answer(asked[:SEQS], DECODED, ARGMAX)
    ties = 0
    for i, one in enumerate(asked):
        want = model.expected_logits(one.ids + one.answer[:-1], len(one.answer) - 1)[len(one.ids) - 1 :]
        for at, token in enumerate(one.answer):
            best = want[at].topk(2)
            if token == int(best.indices[0]):
                continue
            gap = float(best.values[0] - best.values[1])
            if gap >= TOLERANCE:
                raise CheckFailed(
                    f"answer {i} of {len(asked)} diverges at token {at}, where the best logit leads by {gap:.2g}"
                )
            ties += 1
            break
    return f"{len(asked)} answers of {DECODED} tokens, {ties} diverged at ties"


def _require_generation(model: CheckedModel) -> None:
    if model.config.pooling is not None:
        raise Skipped(f"{model.config.architecture} has no output head")


def padding(model: CheckedModel, policy: str) -> str:
    """NaN in SINK and junk in padding change no bit of a real row."""
    _require_generation(model)
    return program_checks.padding(model.target(policy))


def ranks(model: CheckedModel) -> str:
    """Two ranks that share the model have transformers' logits."""
    c = model.config.text
    if c.heads % RANKS or (c.kv_heads > 1 and c.kv_heads % RANKS):
        raise Skipped(f"{c.heads} query and {c.kv_heads} KV heads are not for {RANKS} ranks")
    if c.joint_qk_norm:
        raise Skipped("q and k have norms over all heads, which ranks cannot share")
    if c.recurrent is not None and c.recurrent.units % RANKS:
        raise Skipped(f"{c.recurrent.units} {c.recurrent.unit_name} of recurrent layers are not for {RANKS} ranks")
    assert model.recomputed.model
    want = model.expected_logits(model.ids)
    for rank, got in enumerate(tensor_parallel_logits(model.config, model.ids, RANKS)):
        off = _error(got, want)
        if off > TOLERANCE:
            raise CheckFailed(f"rank {rank} of {RANKS} is off by {off:.2g} of the largest logit")
    return f"{RANKS} ranks"


def _with(check: Callable[..., str], **given: object) -> Callable[[CheckedModel], str]:
    """Returns a check with fixed values of its other arguments; its docstring is kept."""
    return update_wrapper(partial(check, **given), check)


OF_IMAGES = "pictures."
"""Prefix of the names of checks that need a vision tower."""

CHECKS: dict[str, Callable[[CheckedModel], str]] = {
    "config": config_keys,
    "weights": weights,
    "ledger": ledger,
    "parts": parts,
    "logits.whole": _with(logits, chunk=0),
    "logits.chunks-of-7": _with(logits, chunk=7),
    "logits.chunks-of-1": _with(logits, chunk=1),
    "pictures.rows": image_rows,
    "pictures.logits": image_logits,
    "tokens.serving": _with(tokens, policy=""),
    "tokens.padded": _with(tokens, policy="padded"),
    "padding.serving": _with(padding, policy=""),
    "padding.padded": _with(padding, policy="padded"),
    "ranks": ranks,
}
"""Checks by name, in order. A check returns its figure, or raises CheckFailed or Skipped."""


def run(model: CheckedModel, only: Iterable[str] = (), tell: Callable[[Result], None] = lambda result: None) -> Report:
    """Runs every check, or those whose names begin with one of ``only``, and calls ``tell`` with each result."""
    prefixes = tuple(only)
    report = Report(model.given.name, "cpu", "float32")
    threads = torch.get_num_threads()
    try:
        for name, check in CHECKS.items():
            asked = not prefixes or name.startswith(prefixes)
            if asked and (model.has_tower or not name.startswith(OF_IMAGES)):
                report.results.append(run_check(name, check, model))
                tell(report.results[-1])
    finally:
        torch.set_num_threads(threads)
    return report
