"""The golden data of the small checkpoints as cases to run, and how far a correct implementation may be off.

The full folder (``shared/golden``) is used where it exists, else the subset that travels in the package. Tolerances
are those of golden/README.md §5; a sequence of the subset carries ``<name>.rows``, the rows that were kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from deepinfer_kernels.testing import golden_dir, packaged_golden_dir
from deepinfer_plugin.reference.model import ReferenceModel
from deepinfer_plugin.settings import Arithmetic

S32_ATOL = 2e-4  # every row
S32_GAP = 1e-3  # argmax must agree where the two largest logits are further apart
STABLE_ATOL = {Arithmetic.Q32: 1e-3, Arithmetic.REF: 2e-3}  # rows flagged stable
STABLE_SHARE = {Arithmetic.Q32: 0.85, Arithmetic.REF: 0.50}  # of the stable rows of all files, at least
ARGMAX_SHARE = {Arithmetic.Q32: 0.75, Arithmetic.REF: 0.60}  # of all rows, at least
REF_MEDIAN = 2.0  # of the row maxima in ref, at most


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A checkpoint that ``reference.tiny.write_checkpoint`` can write."""

    name: str
    seed: int
    swiglu_limit: float | None = None

    @property
    def folder(self) -> str:
        return f"{self.name}-s{self.seed}"


CHECKPOINTS = tuple(
    Checkpoint(name, seed) for name, seed in (("tiny", 0), ("tiny", 1), ("tiny", 2), ("nano", 0), ("nano", 1))
)
LIMITED = Checkpoint("tiny", 0, 0.5)  # every clamp of the SwiGLU acts


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenCase:
    """One sequence with its recorded logits in one arithmetic."""

    checkpoint: Checkpoint
    label: str  # file and sequence, for messages
    arithmetic: Arithmetic
    tokens: torch.Tensor  # [num_tokens] int64
    num_prompt: int  # tokens of the prompt; the file fed the later ones one at a time
    rows: torch.Tensor  # [num_rows] int64, positions of the recorded rows, ascending
    logits: torch.Tensor  # [num_rows, vocab_size] fp32
    is_stable: torch.Tensor  # [num_rows] bool

    def only(self, chosen: torch.Tensor) -> GoldenCase:
        """The case with some of its recorded rows; chosen: [num_rows] bool."""
        return replace(self, rows=self.rows[chosen], logits=self.logits[chosen], is_stable=self.is_stable[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class RowErrors:
    """How far the rows of one or many cases are off."""

    label: str
    error: torch.Tensor  # [num_rows] fp32, largest absolute difference over the vocabulary
    is_argmax_equal: torch.Tensor  # [num_rows] bool
    gap: torch.Tensor  # [num_rows] fp32, recorded top-1 minus top-2
    is_stable: torch.Tensor  # [num_rows] bool

    @classmethod
    def of(cls, case: GoldenCase, logits: torch.Tensor) -> RowErrors:
        """Compare ``logits`` [num_rows, vocab_size], the rows ``case.rows``, with the recorded ones."""
        top = case.logits.topk(2, dim=-1).values
        difference = (logits.cpu() - case.logits).abs().amax(dim=-1)
        return cls(
            label=f"{case.checkpoint.folder} {case.label} {case.arithmetic.value}",
            error=difference.nan_to_num(nan=float("inf")),
            is_argmax_equal=lowest_argmax(logits.cpu()) == lowest_argmax(case.logits),
            gap=top[:, 0] - top[:, 1],
            is_stable=case.is_stable,
        )

    @classmethod
    def join(cls, label: str, parts: Iterable[RowErrors]) -> RowErrors:
        """All rows of ``parts`` as one."""
        kept = list(parts)
        return cls(
            label=label,
            error=torch.cat([part.error for part in kept]),
            is_argmax_equal=torch.cat([part.is_argmax_equal for part in kept]),
            gap=torch.cat([part.gap for part in kept]),
            is_stable=torch.cat([part.is_stable for part in kept]),
        )

    def assert_s32(self) -> None:
        """Fail unless every row is inside the tolerance of ``s32``."""
        worst = int(self.error.argmax())
        num_outside = int((self.error > S32_ATOL).sum())
        assert num_outside == 0, (
            f"{self.label}: {num_outside} of {len(self.error)} rows differ by more than {S32_ATOL}; "
            f"largest {float(self.error[worst])} in recorded row {worst}"
        )
        is_wrong = ~self.is_argmax_equal & (self.gap > S32_GAP)
        assert not bool(is_wrong.any()), f"{self.label}: argmax differs in recorded rows {is_wrong.nonzero().tolist()}"

    def stable_share(self, atol: float) -> float:
        """Share of the rows flagged stable that are within ``atol``."""
        return float((self.error[self.is_stable] <= atol).float().mean())

    def argmax_share(self) -> float:
        """Share of all rows whose argmax agrees."""
        return float(self.is_argmax_equal.float().mean())


def lowest_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Id of the largest logit of each row, the lowest on equal ones; [..., vocab_size] to int64 [...]."""
    is_top = logits == logits.amax(dim=-1, keepdim=True)
    return is_top.to(torch.int8).argmax(dim=-1)


def golden_roots() -> tuple[Path, ...]:
    """Folders with golden data, the one to prefer first."""
    return tuple(root for root in (golden_dir(), packaged_golden_dir()) if root is not None)


def find_golden(relative: str) -> Path | None:
    """Path of one golden file, or None where neither the full folder nor the subset has it."""
    return next((root / relative for root in golden_roots() if (root / relative).is_file()), None)


def prefill_cases(path: Path, checkpoint: Checkpoint, arithmetic: Arithmetic) -> list[GoldenCase]:
    """Sequences of a ``prefill`` or ``swiglu_limit`` file, in name order."""
    tensors, mode = load_file(path), arithmetic.value
    names = sorted(key.removesuffix(f".logits.{mode}") for key in tensors if key.endswith(f".logits.{mode}"))
    cases = []
    for name in names:
        tokens, logits = tensors[f"{name}.tokens"].long(), tensors[f"{name}.logits.{mode}"]
        num_tokens = tokens.shape[0]
        last_rows = torch.arange(num_tokens - logits.shape[0], num_tokens)
        cases.append(
            GoldenCase(
                checkpoint=checkpoint,
                label=f"{path.stem} {name}",
                arithmetic=arithmetic,
                tokens=tokens,
                num_prompt=num_tokens,
                rows=tensors[f"{name}.rows"].long() if f"{name}.rows" in tensors else last_rows,
                logits=logits,
                is_stable=tensors[f"{name}.stable.{mode}"].bool(),
            )
        )
    return cases


def decode_cases(path: Path, checkpoint: Checkpoint, arithmetic: Arithmetic) -> list[GoldenCase]:
    """Greedy continuations of a ``decode`` file: the prompt, then every chosen token but the last."""
    tensors, mode = load_file(path), arithmetic.value
    names = sorted(key.removesuffix(".prompt") for key in tensors if key.endswith(".prompt"))
    cases = []
    for name in names:
        prompt, logits = tensors[f"{name}.prompt"].long(), tensors[f"{name}.logits.{mode}"]
        num_prompt, num_rows = prompt.shape[0], logits.shape[0]
        cases.append(
            GoldenCase(
                checkpoint=checkpoint,
                label=f"{path.stem} {name}",
                arithmetic=arithmetic,
                tokens=torch.cat([prompt, tensors[f"{name}.tokens.{mode}"][: num_rows - 1].long()]),
                num_prompt=num_prompt,
                rows=torch.arange(num_prompt - 1, num_prompt - 1 + num_rows),
                logits=logits,
                is_stable=tensors[f"{name}.stable.{mode}"].bool(),
            )
        )
    return cases


def all_cases(arithmetic: Arithmetic) -> Iterator[GoldenCase]:
    """Every text sequence of every golden file that is here: prefill, decode and the limited SwiGLU."""
    for checkpoint in CHECKPOINTS:
        prefill = find_golden(f"{checkpoint.folder}/prefill.safetensors")
        if prefill is not None:
            yield from prefill_cases(prefill, checkpoint, arithmetic)
        decode = find_golden(f"{checkpoint.folder}/decode.safetensors")
        if decode is not None:
            yield from decode_cases(decode, checkpoint, arithmetic)
    limited = find_golden(f"{LIMITED.folder}/swiglu_limit_0.5.safetensors")
    if limited is not None:
        yield from prefill_cases(limited, LIMITED, arithmetic)


def run_chunks(model: ReferenceModel, tokens: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Logits of every row with ``tokens`` fed in calls of ``sizes``, which must add up to their number."""
    assert sum(sizes) == tokens.shape[0], (list(sizes), tokens.shape)
    cache = model.new_cache(tokens.shape[0])
    rows = [model.forward(tokens[cache.length : cache.length + size], cache) for size in sizes]
    return torch.cat(rows)


def run_case(model: ReferenceModel, case: GoldenCase) -> RowErrors:
    """Feed all tokens of a case in one call; test_golden_chunks.py shows that single tokens give the same bits."""
    return RowErrors.of(case, model.prefill(case.tokens)[case.rows])


def cycled_sizes(total: int, cycle: Sequence[int]) -> list[int]:
    """Chunk sizes that repeat ``cycle`` until they add up to ``total``; the last one is cut."""
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(min(cycle[len(sizes) % len(cycle)], total - sum(sizes)))
    return sizes
