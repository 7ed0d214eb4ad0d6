"""The safetensors files of a checkpoint: where each tensor lies, and reading one tensor at a time.

Only headers are read to find out what a checkpoint holds. Tensor data goes from the file into one new buffer by
offset: a memory-mapped shard would stay resident, next to the parameters it was copied to.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the data without gaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

from deepinfer_plugin.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
NAME_PREFIX = "model."  # accepted in front of every name, and dropped
DTYPES = {
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format; a larger number means that the file is something else
_AGAIN = "download the file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies. ``offset`` counts from the start of the file; ``dtype`` is the word of the header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def stored_tensors(model_dir: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by name (without ``model.``), shard by shard in the order of the data.

    Args:
        model_dir: a folder with an index and its shards, or with one ``model.safetensors``.

    Raises:
        CheckpointError: an index or shard is missing, damaged, or the two disagree.
    """
    index = model_dir / INDEX_FILE
    if not index.is_file():
        single = model_dir / SINGLE_FILE
        if not single.is_file():
            raise CheckpointError(
                f"check_checkpoint: {model_dir} is without {INDEX_FILE} and {SINGLE_FILE}, expected one of them; "
                "point to a complete checkpoint directory"
            )
        return read_header(single)
    weight_map = _read_weight_map(index)
    for name in sorted(weight_map):
        if not (model_dir / weight_map[name]).is_file():
            raise CheckpointError(
                f"check_checkpoint: {index} names the file {weight_map[name]} (for tensor {name}), which is missing "
                f"from {model_dir}, expected every shard beside the index; download the missing file"
            )
    stored: dict[str, StoredTensor] = {}
    for file_name in sorted(set(weight_map.values())):
        for name, tensor in read_header(model_dir / file_name).items():
            _check_against_index(name, tensor, stored, weight_map, index)
            stored[name] = tensor
    for name in sorted(weight_map):
        if name not in stored:
            raise CheckpointError(
                f"check_checkpoint: tensor {name} is missing from {model_dir / weight_map[name]}, expected it there "
                f"as {INDEX_FILE} says; download shard and index again, of one revision"
            )
    return stored


def _check_against_index(
    name: str, tensor: StoredTensor, stored: Mapping[str, StoredTensor], weight_map: Mapping[str, str], index: Path
) -> None:
    if name in stored:
        raise CheckpointError(
            f"check_checkpoint: tensor {name} is in {stored[name].file} and again in {tensor.file}, expected it once; "
            "remove the file that does not belong to this checkpoint"
        )
    listed = weight_map.get(name)
    if listed is None:
        raise CheckpointError(
            f"check_checkpoint: tensor {name} in {tensor.file} is not listed in {index}, expected every tensor in the "
            "index; download shard and index again, of one revision"
        )
    if listed != tensor.file.name:
        raise CheckpointError(
            f"check_checkpoint: tensor {name} is in {tensor.file}, expected it in {listed} as {index} says; "
            "download shard and index again, of one revision"
        )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ; ``model.x`` and ``x`` are the same tensor."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        name = key.removeprefix(NAME_PREFIX)
        if name in result:
            raise ValueError(f"{name} is listed twice")
        result[name] = value
    return result


def _read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name (without ``model.``) to file name."""
    try:
        content = json.loads(index.read_bytes(), object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise CheckpointError(
            f"check_checkpoint: {index} is damaged ({error}), expected JSON that lists each tensor once; {_AGAIN}"
        ) from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"check_checkpoint: {index} is without weight_map, expected an object from tensor to file name; {_AGAIN}"
        )
    for name, file_name in weight_map.items():
        if (
            not isinstance(file_name, str)
            or not file_name.endswith(".safetensors")
            or Path(file_name).name != file_name
        ):
            raise CheckpointError(
                f"check_checkpoint: {index} maps tensor {name} to {file_name!r}, expected the name of a .safetensors "
                f"file beside the index; {_AGAIN}"
            )
    return weight_map


def read_header(shard: Path) -> dict[str, StoredTensor]:
    """The tensors of one shard by name (without ``model.``), in the order of their data; reads no tensor data.

    Raises:
        CheckpointError: the file is cut off, has bytes left over, or its header is not one of the format.
    """
    size = shard.stat().st_size
    with shard.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or header_bytes > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"check_checkpoint: {shard} is {size} bytes long and announces a header of {header_bytes} bytes, "
                f"expected a whole safetensors file (it is truncated or of another format); {_AGAIN}"
            )
        raw = file.read(header_bytes)
    data_start = _LENGTH_BYTES + header_bytes
    tensors = _parse_header(raw, shard, data_start)
    end = data_start
    for name, tensor in tensors.items():
        if tensor.offset != end:
            raise _bad_header(
                shard, f"tensor {name} begins at byte {tensor.offset}, not at {end} where the last one ends"
            )
        end += tensor.num_bytes
    if size < end:
        cut = next(name for name, tensor in tensors.items() if tensor.offset + tensor.num_bytes > size)
        raise CheckpointError(
            f"check_checkpoint: {shard} is truncated at {size} bytes, in tensor {cut}, expected {end} bytes; {_AGAIN}"
        )
    if size > end:
        raise CheckpointError(
            f"check_checkpoint: {shard} is {size} bytes long, expected {end} as its header says; {_AGAIN}"
        )
    return tensors


def _parse_header(raw: bytes, shard: Path, data_start: int) -> dict[str, StoredTensor]:
    try:
        header = json.loads(raw, object_pairs_hook=_unique_keys)
        header.pop("__metadata__", None)
        tensors = [(name, _parse_entry(entry, shard, data_start)) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _bad_header(shard, f"{type(error).__name__}: {error}") from error
    for name, tensor in tensors:
        itemsize = DTYPES[tensor.dtype].itemsize if tensor.dtype in DTYPES else None  # others: refused by the caller
        if itemsize is not None and tensor.num_bytes != math.prod(tensor.shape) * itemsize:
            raise _bad_header(
                shard, f"tensor {name}, {tensor.dtype} {list(tensor.shape)}, has {tensor.num_bytes} bytes of data"
            )
    return dict(sorted(tensors, key=lambda item: (item[1].offset, item[1].num_bytes)))


def _parse_entry(entry: Mapping[str, Any], shard: Path, data_start: int) -> StoredTensor:
    begin, end = map(int, entry["data_offsets"])
    shape = tuple(map(int, entry["shape"]))
    return StoredTensor(
        file=shard, dtype=str(entry["dtype"]), shape=shape, offset=data_start + begin, num_bytes=end - begin
    )


def _bad_header(shard: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"check_checkpoint: the header of {shard} is damaged ({problem}), expected the safetensors format; {_AGAIN}"
    )


def read_rows(file: RawIOBase, name: str, stored: StoredTensor, rows: range) -> torch.Tensor:
    """Read consecutive rows of one tensor into a new buffer, in the dtype on disk; nothing else is read.

    Args:
        file: the shard of ``stored``, opened without buffering.
        name: for the message.
        stored: a tensor whose dtype is one of ``DTYPES``.
        rows: along its first axis, ascending by one.

    Raises:
        CheckpointError: the file ends before the tensor does.
    """
    row_bytes = stored.num_bytes // stored.shape[0]
    buffer = torch.empty(len(rows) * row_bytes, dtype=torch.uint8)
    room = memoryview(buffer.numpy())
    file.seek(stored.offset + rows.start * row_bytes)
    while room:
        count = file.readinto(room)
        if not count:
            raise CheckpointError(
                f"iterate_tensors: {stored.file} ends {len(room)} bytes before the end of tensor {name}, expected the "
                "file that was checked; leave a checkpoint alone while it is being loaded"
            )
        room = room[count:]
    return buffer.view(DTYPES[stored.dtype]).reshape(len(rows), *stored.shape[1:])
