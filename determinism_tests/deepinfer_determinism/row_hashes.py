"""A hash per (request, position, operation), taken on the device while the model runs.

The probe wraps the public operations of ``deepinfer_kernels`` where the model and the sampler have imported them. Each
output row becomes one 64-bit sum that does not depend on the order of its terms, written into a buffer that lives as
long as the process: no call waits for the device, and a CUDA graph that captured the writes repeats them. Buffers are
read once per step. A probe is named as a fault of a schedule: ``deepinfer_determinism.row_hashes:probe(CONFIG.json)``.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

PROBE = f"{__name__}:probe"
HOSTS = ("deepinfer_plugin.model", "deepinfer_plugin.sampling")  # packages whose imported operations are wrapped
SLOT_OPERATIONS = ("window_slots", "entry_slots")  # physical slots differ between runs: only which are set is hashed
OF_RANKS = frozenset(("expert_places",))  # where experts are differs between runs, and no result shows it: not hashed
OPEN_ENDED = ("indexer_logits", "mask_to_candidates")  # their width follows the longest request; -inf fills it up
# Odd 64-bit constants of SplitMix64, as int64: fractional part of the golden ratio, and its two multipliers.
GOLDEN, FIRST_FACTOR, SECOND_FACTOR = -7046029254386353131, -4658895280553007687, -7723592293110705685
LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def row_hash(x: torch.Tensor, *, operation: str = "") -> torch.Tensor:
    """One number per row, equal for equal bits.

    Args:
        x: [num_rows, ...] of any dtype.
        operation: name of the operation that gave it; slots are reduced to which are set, and -inf is left out where it
            only fills up.

    Returns:
        [num_rows] int64: the sum over columns, modulo 2^64, of a mix of the element's bits with its column.

    Invariance: bitwise per row; integer sums have no order.
    """
    rows = x.reshape(x.shape[0], -1)
    if operation in SLOT_OPERATIONS:
        rows = rows >= 0
    is_filler = rows == -torch.inf if operation in OPEN_ENDED else None
    if rows.dtype is torch.bool:
        rows = rows.to(torch.uint8)
    lanes = rows.contiguous().view(LANES[rows.element_size()]).to(torch.int64)
    columns = torch.arange(1, lanes.shape[1] + 1, dtype=torch.int64, device=x.device)
    z = (lanes ^ (columns * GOLDEN)) * FIRST_FACTOR
    z = (z ^ _shifted(z, 30)) * SECOND_FACTOR
    z = z ^ _shifted(z, 31)
    if is_filler is not None:
        z = z.masked_fill(is_filler, 0)
    return z.sum(dim=1)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True, order=True)
class RowName:
    """One row of one run: the row of ``request`` at ``position``, computed in engine step ``step``."""

    request: str
    position: int
    step: int


@dataclass(frozen=True, slots=True)
class Target:
    """The row whose values are wanted, not only its hash."""

    request: str
    position: int
    operation: str


@dataclass(frozen=True, slots=True)
class _Held:
    """Rows of the target's operation. ``domain`` is ``tokens`` or ``logits``: what they are rows of."""

    values: torch.Tensor
    domain: str


@dataclass(slots=True)
class Recorder:
    """Buffers of one engine, and what was read from them.

    Attributes:
        calls: operations hashed; what a fault reports.
        seen: what an observer reports; hashes go to a file instead.
        replayed: rows read from buffers that a captured graph has written, without any Python of ours.
        captured: values of the target's row, the first time it was computed.
    """

    target: Target | None = None
    calls: int = 0
    seen: dict[str, int] = field(default_factory=dict)
    replayed: int = 0
    captured: torch.Tensor | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # hashes by key
    found: list[tuple[RowName, dict[str, int]]] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # id of a module -> its name in the model
    is_suspended: bool = False
    _stack: list[str] = field(default_factory=list)
    _seen: dict[str, int] = field(default_factory=dict)  # key -> times written in this step
    _domains: dict[str, str] = field(default_factory=dict)  # key -> what its rows are in this step: tokens or logits
    _order: list[str] = field(default_factory=list)  # keys as a whole step writes them
    _last: str | None = None  # the key written before, in this step
    _by_rows: dict[int, list[str]] = field(default_factory=dict)  # rows of a captured graph -> its keys
    _held: _Held | None = None  # as this step, or a captured graph, writes them
    _held_by_rows: dict[int, _Held] = field(default_factory=dict)
    _held_buffers: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)  # by shape of a row
    _step: int = -1
    _has_begun: bool = False  # the step that the model is about to compute
    _num_rows: int = 0
    _max_rows: int = 0
    _num_logits: int = 0
    _logits_calls: int = 0
    _batch: Any = None  # (request of each row, positions, rows of the logits) of the step, on host and device

    def begin_with_embedding(self, batch: Any, max_rows: int) -> None:
        """A step of a model that takes images: its rows are embedded before ``begin`` is called for it."""
        self.begin(batch, max_rows)
        self._has_begun = True

    def begin(self, batch: Any, max_rows: int) -> None:
        """A step starts: read what the last one left, then note who owns which row."""
        if self._has_begun:
            self._has_begun = False
            return
        self.collect()
        self._start(batch.num_tokens_after_padding, max_rows)
        self._step += 1
        counts = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1])
        owners = [_name(req_id) for req_id, count in zip(batch.req_ids, counts, strict=True) for _ in range(count)]
        self._batch = (owners, batch.positions.clone(), batch.logits_indices.clone())
        self._num_logits = batch.logits_indices.shape[0]

    def begin_dummy(self, num_rows: int, max_rows: int) -> None:
        """A run that serves nobody: it may be one that a graph captures, so writes go on; nothing is read."""
        self.collect()
        self._start(num_rows, max_rows)

    def collect(self) -> None:
        """Read the buffers of the step that has ended; the only point that waits for the device."""
        if self._batch is None:
            of_tokens = self._of_tokens()
            if self._num_rows and of_tokens:
                self._by_rows[self._num_rows] = of_tokens
                if self._held is not None:
                    self._held_by_rows[self._num_rows] = self._held
            return
        owners, positions, logits_rows = self._batch
        self._batch = None
        written, captured = list(self._domains), self._by_rows.get(self._num_rows, [])
        if captured and not any(key in captured for key in self._of_tokens()):
            # a graph ran, no Python did, but for what stands around the graph; that may be the head, which the graph
            # of a step whose rows are all sampled computes itself
            written += [key for key in captured if key not in self._domains]
            self._held = self._held or self._held_by_rows.get(self._num_rows)
            self.replayed += len(owners)
        places = positions.tolist()
        of_logits = logits_rows.tolist()
        rows: list[dict[str, int]] = [{} for _ in owners]
        for key in written:
            indices = of_logits if self._domains.get(key) == "logits" else range(len(owners))
            values = self.buffers[key][: len(indices)].tolist()
            for index, value in zip(indices, values, strict=True):
                rows[index][key] = value
        for index, owner in enumerate(owners):
            self.found.append((RowName(owner, places[index], self._step), rows[index]))
        self._take_target(owners, places, of_logits)

    def _of_tokens(self) -> list[str]:
        """Keys that Python wrote in this step, or in this capture, of its token rows."""
        return [key for key, domain in self._domains.items() if domain == "tokens"]

    def enter(self, module: torch.nn.Module) -> None:
        self._stack.append(self.names.get(id(module), self._stack[-1] if self._stack else ""))

    def leave(self) -> None:
        self._stack.pop()

    def logits_begin(self) -> None:
        """Rows are now those of the sampled tokens; a second time in a step they are those of prompt scores."""
        self._logits_calls += 1

    def write(self, operation: str, result: Any) -> None:
        """Hash what an operation returned, if its rows are those of the step."""
        if self.is_suspended or not self._num_rows or self._logits_calls > 1:
            return
        if isinstance(result, tuple):
            for index, part in enumerate(result):
                self.write(f"{operation}.{index}", part)
            return
        domain, expected = ("logits", self._num_logits) if self._logits_calls else ("tokens", self._num_rows)
        if not isinstance(result, torch.Tensor) or result.ndim == 0 or result.shape[0] != expected or not expected:
            return
        key = f"{self._stack[-1] if self._stack else 'sampler'}/{operation}"
        self._seen[key] = times = self._seen.get(key, 0) + 1
        if times > 1:
            key = f"{key}#{times}"
            self._seen[key] = 1
        buffer = self.buffers.get(key)
        if buffer is None:
            buffer = torch.zeros(max(self._max_rows, expected), dtype=torch.int64, device=result.device)
            self.buffers[key] = buffer
            # a run that only measures memory leaves operations out: a new one belongs behind its predecessor
            self._order.insert(0 if self._last is None else self._order.index(self._last) + 1, key)
        self._last, self._domains[key] = key, domain
        buffer[:expected].copy_(row_hash(result, operation=operation))
        self.calls += 1
        if self.target is not None and self.captured is None and key == self.target.operation:
            self._hold(result >= 0 if operation in SLOT_OPERATIONS else result, domain)

    def _start(self, num_rows: int, max_rows: int) -> None:
        self._num_rows, self._max_rows = num_rows, max_rows
        self._num_logits = self._logits_calls = 0
        self._seen, self._domains, self._held, self._last = {}, {}, None, None

    def _hold(self, result: torch.Tensor, domain: str) -> None:
        """Copy the rows into a buffer that outlives the step; a graph repeats the copy."""
        shape = tuple(result.shape[1:])
        held = self._held_buffers.get(shape)
        if held is None:
            rows = max(self._max_rows, result.shape[0])
            held = self._held_buffers[shape] = result.new_zeros((rows, *shape))
        held[: result.shape[0]].copy_(result)
        self._held = _Held(held, domain)

    def _take_target(self, owners: list[str], places: list[int], of_logits: list[int]) -> None:
        """Keep the target's row of the step that has ended, if the step computed it."""
        if self.target is None or self.captured is not None or self._held is None:
            return
        rows = range(len(owners)) if self._held.domain == "tokens" else of_logits
        for number, row in enumerate(rows):
            if owners[row] == self.target.request and places[row] == self.target.position:
                self.captured = self._held.values[number].detach().clone().cpu()
                return

    def save(self, out: Path) -> None:
        """Write rows and hashes; -1 columns of ``present`` are False where an operation did not compute a row."""
        keys = self._order
        column = {key: index for index, key in enumerate(keys)}
        hashes = np.zeros((len(self.found), len(keys)), dtype=np.int64)
        present = np.zeros((len(self.found), len(keys)), dtype=np.bool_)
        for row, (_, values) in enumerate(self.found):
            for key, value in values.items():
                hashes[row, column[key]] = value
                present[row, column[key]] = True
        rows = [[name.request, name.position, name.step] for name, _ in self.found]
        captured = {} if self.captured is None else {"captured": _as_numbers(self.captured)}
        names = json.dumps({"operations": keys, "rows": rows, "replayed": self.replayed}, ensure_ascii=False)
        text = np.frombuffer(names.encode(), dtype=np.uint8)
        np.savez(out, allow_pickle=False, names=text, hashes=hashes, present=present, **captured)


@dataclass(frozen=True, slots=True)
class RowHashes:
    """What a probe has written.

    Attributes:
        operations: in the order of a step.
        rows: in the order in which they were computed.
        hashes: [num_rows, num_operations] int64.
        present: same shape; whether the operation computed the row.
        captured: values of the target's row, or None.
        replayed: rows that a captured graph hashed.
    """

    operations: tuple[str, ...]
    rows: tuple[RowName, ...]
    hashes: np.ndarray[Any, np.dtype[np.int64]]
    present: np.ndarray[Any, np.dtype[np.bool_]]
    captured: np.ndarray[Any, Any] | None
    replayed: int = 0


def read(path: Path) -> RowHashes:
    """What ``Recorder.save`` wrote."""
    with np.load(path) as file:
        names = json.loads(file["names"].tobytes().decode())
        return RowHashes(
            operations=tuple(names["operations"]),
            rows=tuple(RowName(request, position, step) for request, position, step in names["rows"]),
            hashes=file["hashes"],
            present=file["present"],
            captured=file.get("captured"),
            replayed=names["replayed"],
        )


@contextmanager
def probe(config: str) -> Iterator[Recorder]:
    """Hash rows from here to the end of the engine.

    Args:
        config: path of a JSON file: ``out``, where the hashes go, and ``target``, null or the three fields of a
            ``Target``.
    """
    settings = json.loads(Path(config).read_text(encoding="utf-8"))
    target = Target(**settings["target"]) if settings["target"] else None
    recorder = Recorder(target=target)
    with ExitStack() as stack:
        _wrap_operations(recorder, stack)
        _wrap_engine(recorder, stack)
        yield recorder
        recorder.collect()
        recorder.save(Path(settings["out"]))


def operation_names() -> frozenset[str]:
    """Names of the public operations: what the packages of ``deepinfer_kernels`` export."""
    import deepinfer_kernels

    found: set[str] = set()
    for info in pkgutil.iter_modules(deepinfer_kernels.__path__):
        if info.ispkg:
            module = importlib.import_module(f"deepinfer_kernels.{info.name}")
            found |= {
                name
                for name, value in vars(module).items()
                if callable(value)
                and not isinstance(value, type)
                and not name.startswith("_")
                and str(getattr(value, "__module__", "")).startswith("deepinfer_kernels.")
            }
    return frozenset(found)


def _wrap_operations(recorder: Recorder, stack: ExitStack) -> None:
    names = operation_names() - OF_RANKS
    for host in HOSTS:
        package = importlib.import_module(host)
        for info in pkgutil.iter_modules(package.__path__, f"{host}."):
            if info.name.rpartition(".")[2].startswith(("test_", "bench_", "conftest")):
                continue
            module = importlib.import_module(info.name)
            for name in sorted(names & vars(module).keys()):
                stack.enter_context(mock.patch.object(module, name, _hashed(recorder, name, vars(module)[name])))


def _hashed(recorder: Recorder, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def hashed(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        recorder.write(name, result)
        return result

    return hashed


def _wrap_engine(recorder: Recorder, stack: ExitStack) -> None:
    """Follow the model's modules, the steps, and the proof at start-up, whose operations must stay as they are."""
    from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM
    from deepinfer_plugin.model.linear import Embedding
    from deepinfer_plugin.worker import model_state

    def before(module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, DeepseekV41ForCausalLM) and id(module) not in recorder.names:
            recorder.names = {id(part): name or "model" for name, part in module.named_modules()}
        recorder.enter(module)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, Embedding):
            recorder.write("embedding", output)
        recorder.leave()

    hooks = torch.nn.modules.module
    stack.callback(hooks.register_module_forward_pre_hook(before).remove)
    stack.callback(hooks.register_module_forward_hook(after, always_call=True).remove)

    def around(owner: Any, name: str, enter: Callable[..., None], leave: Callable[[], None] = lambda: None) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            enter(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                leave()

        stack.enter_context(mock.patch.object(owner, name, wrapped))

    state = model_state.DeepInferModelState
    around(
        state,
        "prepare_inputs_embeds",
        lambda self, encoder, batch, states: recorder.begin_with_embedding(batch, self.max_num_tokens),
    )
    around(state, "prepare_inputs", lambda self, batch, states: recorder.begin(batch, self.max_num_tokens))
    around(state, "prepare_dummy_inputs", lambda self, reqs, tokens: recorder.begin_dummy(tokens, self.max_num_tokens))
    around(DeepseekV41ForCausalLM, "compute_logits", lambda *args: recorder.logits_begin())
    around(model_state, "prove_forward", lambda *args: _suspend(recorder, True), lambda: _suspend(recorder, False))


def _suspend(recorder: Recorder, is_suspended: bool) -> None:
    recorder.is_suspended = is_suspended


def _name(internal_id: str) -> str:
    """vLLM appends a hyphen and eight random characters to the id that it was given."""
    return internal_id.rpartition("-")[0] or internal_id


def _as_numbers(row: torch.Tensor) -> np.ndarray[Any, Any]:
    """Values as float64 or int64, which hold every bit of the narrower types that the model uses."""
    flat = row.reshape(-1)
    array: np.ndarray[Any, Any] = flat.to(torch.float64 if flat.is_floating_point() else torch.int64).numpy()
    return array
