"""From checkpoint to parameters: checked before anything is allocated, then one tensor at a time.

The parameters of the model carry the names of the checkpoint. Only the routed experts differ: their weights are stacked
into ``experts.w13`` (rows of w1, then rows of w3), ``experts.w2`` and the scales of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import nn

from deepinfer_plugin.errors import CheckpointError, ConfigError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.parallel import Parallel
from deepinfer_plugin.model.shards import (
    DTYPE_NAMES,
    INDEX_FILE,
    NAME_PREFIX,
    SINGLE_FILE,
    StoredTensor,
    read_rows,
    stored_tensors,
)
from deepinfer_plugin.model.shares import Shares, hash_layout
from deepinfer_plugin.model.tensors import Group, TensorSpec, expected_tensors

TOKENIZER_FILE = "tokenizer.json"
ALL_GROUPS: tuple[Group, ...] = ("text", "draft", "vision")
TEXT_ONLY: tuple[Group, ...] = ("text",)
ALONE = Parallel()
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<matrix>w[123])\.(?P<part>weight|scale)")
_RAW_BYTES = (torch.float8_e8m0fnu, torch.int8)  # on disk; parameters hold the bytes as uint8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where a tensor, or this rank's rows of it, goes: a whole parameter, or rows of one expert in a stacked one."""

    parameter: str
    expert: int | None = None
    first_row: int = 0


def check_checkpoint(model_dir: str | Path, config: ModelConfig) -> None:
    """Compare the headers of all shards with what ``config`` asks for; reads no tensor data.

    Args:
        model_dir: the checkpoint folder.
        config: its config.json.

    Raises:
        CheckpointError: a file is missing, cut off or damaged; index and shards disagree; a tensor is missing, not
            part of the model, listed twice, or has another shape or dtype. The message names file and tensor.
        ConfigError: ``engram_num_embeddings`` is not what the hash addresses.
    """
    check_engram_tables(config)
    _matched_tensors(Path(model_dir), config)


def check_engram_tables(config: ModelConfig) -> None:
    """Check that every Engram table has as many rows as its hash addresses.

    Raises:
        ConfigError: a number of ``engram_num_embeddings`` is another one.
    """
    layout = hash_layout(config)
    expected = [layout[layer].num_rows for layer in config.engram_layer_ids]
    if expected != list(config.engram_num_embeddings):
        raise ConfigError(
            f"check_checkpoint: text_config.engram_num_embeddings is {list(config.engram_num_embeddings)}, expected "
            f"{expected}, the sums of the primes that follow engram_vocab_size {config.engram_vocab_size}; "
            "correct config.json"
        )


def check_tokenizer(model_dir: str | Path, config: ModelConfig) -> None:
    """Check that tokenizer.json has a token for every row of the embedding, and none beyond.

    Args:
        model_dir: folder of tokenizer.json.
        config: the model's config.json.

    Raises:
        CheckpointError: the file is missing or damaged, or its ids are not 0 .. vocab_size - 1.
    """
    path = Path(model_dir) / TOKENIZER_FILE
    try:
        content = json.loads(path.read_bytes())
        ids = {int(token) for token in content["model"]["vocab"].values()}
        ids |= {int(entry["id"]) for entry in content["added_tokens"]}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"check_tokenizer: {path} is unreadable ({type(error).__name__}: {error}), expected a tokenizer with "
            "model.vocab and added_tokens; use the tokenizer.json of the checkpoint"
        ) from error
    if ids != set(range(config.vocab_size)):
        beyond = sorted(token for token in ids if not 0 <= token < config.vocab_size)
        absent = next((token for token in range(config.vocab_size) if token not in ids), None)
        detail = f"id {beyond[0]} is beyond the embedding" if beyond else f"id {absent} has no token"
        raise CheckpointError(
            f"check_tokenizer: {path} is a vocabulary of {len(ids)} tokens ({detail}), expected "
            f"text_config.vocab_size {config.vocab_size}; use the tokenizer.json of the checkpoint"
        )


def iterate_tensors(
    model_dir: str | Path,
    config: ModelConfig,
    groups: Collection[Group] = ALL_GROUPS,
    parallel: Parallel = ALONE,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Read this rank's rows of the checkpoint shard by shard, one tensor in memory at a time.

    Nothing is kept: host memory holds one tensor beyond what the caller holds. Rows of other ranks are not read.

    Args:
        model_dir: the checkpoint folder.
        config: its config.json.
        groups: parts of the model to read; the others are not read from disk.
        parallel: whose rows to read.

    Yields:
        (name without ``model.``, rows on CPU in the dtype on disk), in the order of the data in each shard.

    Raises:
        CheckpointError: as ``check_checkpoint``, before the first tensor; or a file changed while it was read.
    """
    specs, stored = _matched_tensors(Path(model_dir), config)
    shares = Shares(config, parallel)
    wanted = [(name, tensor) for name, tensor in stored.items() if specs[name].group in groups]
    for shard, tensors in groupby(wanted, key=lambda item: item[1].file):
        with shard.open("rb", buffering=0) as file:
            for name, tensor in tensors:
                rows = shares.rows(name, specs[name])
                if rows is not None:
                    yield name, read_rows(file, name, tensor, rows)


def _matched_tensors(model_dir: Path, config: ModelConfig) -> tuple[dict[str, TensorSpec], dict[str, StoredTensor]]:
    """The expected and the stored tensors, once they agree."""
    specs, stored = expected_tensors(config), stored_tensors(model_dir)
    for name, tensor in stored.items():
        if name not in specs:
            raise CheckpointError(
                f"check_checkpoint: tensor {name} in {tensor.file} is not part of the model, expected only the "
                "tensors that config.json asks for; use config.json and shards of one checkpoint"
            )
        spec = specs[name]
        if tensor.shape != spec.shape or tensor.dtype != DTYPE_NAMES[spec.dtype]:
            raise CheckpointError(
                f"check_checkpoint: tensor {name} in {tensor.file} is {tensor.dtype} {list(tensor.shape)}, expected "
                f"{DTYPE_NAMES[spec.dtype]} {list(spec.shape)}; use config.json and shards of one checkpoint"
            )
    missing = sorted(specs.keys() - stored.keys())
    if missing:
        index = model_dir / INDEX_FILE
        where = index if index.is_file() else model_dir / SINGLE_FILE
        raise CheckpointError(
            f"check_checkpoint: tensor {missing[0]}{_others(missing)} is missing from {where}, expected "
            f"{DTYPE_NAMES[specs[missing[0]].dtype]} {list(specs[missing[0]].shape)}; download the whole checkpoint"
        )
    return specs, stored


def parameter_specs(
    config: ModelConfig, groups: Collection[Group] = TEXT_ONLY, parallel: Parallel = ALONE
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of this rank's parameters of these parts, by name; scales and packed weights are uint8."""
    rows: dict[str, int] = {}
    experts: dict[str, int] = {}
    result: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    shares = Shares(config, parallel)
    for name, spec in _specs_of(config, groups).items():
        own_rows = shares.rows(name, spec)
        if own_rows is None:
            continue
        place = _place(name, len(own_rows), shares)
        dtype = torch.uint8 if spec.dtype in _RAW_BYTES else spec.dtype
        if place.expert is None:
            result[place.parameter] = ((len(own_rows), *spec.shape[1:]), dtype)
            continue
        rows[place.parameter] = max(rows.get(place.parameter, 0), place.first_row + len(own_rows))
        experts[place.parameter] = max(experts.get(place.parameter, 0), place.expert + 1)
        result[place.parameter] = ((experts[place.parameter], rows[place.parameter], spec.shape[1]), dtype)
    return result


@torch.no_grad()
def load_into(
    model: nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: ModelConfig,
    groups: Collection[Group] = TEXT_ONLY,
    parallel: Parallel = ALONE,
) -> set[str]:
    """Fill every parameter of the model; every tensor is consumed exactly once.

    Tensors of other parts than ``groups`` are checked and passed over. Names may carry the prefix ``model.``. The model
    is compared with ``config`` before the first tensor is taken; after an error further on, its parameters are partly
    filled and it must be dropped.

    Args:
        model: has exactly the parameters of ``parameter_specs(config, groups, parallel)``, on any device.
        tensors: (name, tensor in the dtype on disk), in any order; each is released before the next is taken. A tensor
            is whole, or this rank's rows of it; one that another rank holds is passed over.
        config: the model's config.json.
        groups: parts that the model holds.
        parallel: the ranks; ``model`` is what one of them holds.

    Returns:
        The names of the parameters that were filled: all.

    Raises:
        CheckpointError: a tensor is missing, unknown, given twice, or has another shape or dtype; or the model has
            other parameters.
    """
    specs = expected_tensors(config)
    shares = Shares(config, parallel)
    parameters = dict(model.named_parameters())
    _check_parameters(parameters, parameter_specs(config, groups, parallel))
    seen: set[str] = set()
    for given_name, tensor in tensors:
        name = given_name.removeprefix(NAME_PREFIX)
        rows = _own_rows(name, specs, shares)
        _check_given(name, tensor, specs, rows, seen)
        seen.add(name)
        if specs[name].group in groups and rows is not None:
            place = _place(name, len(rows), shares)
            if len(tensor) != len(rows):
                tensor = tensor[rows.start : rows.stop]
            target = parameters[place.parameter].data
            if place.expert is not None:
                target = target[place.expert, place.first_row : place.first_row + tensor.shape[0]]
            target.copy_(tensor.view(torch.uint8) if tensor.dtype in _RAW_BYTES else tensor)
        del tensor  # or it would stay alive while the next one is read
    own = {name for name, spec in _specs_of(config, groups).items() if shares.rows(name, spec) is not None}
    missing = sorted(own - seen)
    if missing:
        raise CheckpointError(
            f"load_into: tensor {missing[0]}{_others(missing)} is missing, expected every tensor of the model; "
            "load the whole checkpoint"
        )
    return set(parameters)


def _specs_of(config: ModelConfig, groups: Collection[Group]) -> dict[str, TensorSpec]:
    return {name: spec for name, spec in expected_tensors(config).items() if spec.group in groups}


def _own_rows(name: str, specs: dict[str, TensorSpec], shares: Shares) -> range | None:
    """Rows of a tensor that are here; None also for a name that ``_check_given`` refuses."""
    return shares.rows(name, specs[name]) if name in specs else None


def _place(name: str, num_rows: int, shares: Shares) -> _Place:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return _Place(parameter=name)
    stack = "w2" if match["matrix"] == "w2" else "w13"
    return _Place(
        parameter=f"{match['experts']}.{stack}{'_scale' if match['part'] == 'scale' else ''}",
        expert=shares.experts(name).index(int(match["expert"])),
        first_row=num_rows if match["matrix"] == "w3" else 0,  # behind as many of w1
    )


def _check_parameters(
    parameters: dict[str, nn.Parameter], specs: dict[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    for name in sorted(specs.keys() | parameters.keys()):
        if name not in specs:
            raise CheckpointError(
                f"load_into: parameter {name} of the model is filled by no tensor, expected the parameters that "
                "parameter_specs lists; build the model from the same config.json"
            )
        shape, dtype = specs[name]
        parameter = parameters.get(name)
        if parameter is None or tuple(parameter.shape) != shape or parameter.dtype != dtype:
            found = "missing" if parameter is None else f"{parameter.dtype} {list(parameter.shape)}"
            raise CheckpointError(
                f"load_into: parameter {name} of the model is {found}, expected {dtype} {list(shape)}; "
                "build the model from the same config.json"
            )


def _check_given(
    name: str, tensor: torch.Tensor, specs: dict[str, TensorSpec], rows: range | None, seen: set[str]
) -> None:
    spec = specs.get(name)
    if spec is None:
        raise CheckpointError(
            f"load_into: tensor {name} is not part of the model, expected only the tensors that config.json asks for; "
            "use config.json and shards of one checkpoint"
        )
    if name in seen:
        raise CheckpointError(
            f"load_into: tensor {name} is given twice, expected once; remove the file that repeats it"
        )
    is_share = rows is not None and tuple(tensor.shape) == (len(rows), *spec.shape[1:])
    if (tuple(tensor.shape) != spec.shape and not is_share) or tensor.dtype != spec.dtype:
        raise CheckpointError(
            f"load_into: tensor {name} is {tensor.dtype} {list(tensor.shape)}, expected {spec.dtype} "
            f"{list(spec.shape)}; use config.json and shards of one checkpoint"
        )


def _others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
