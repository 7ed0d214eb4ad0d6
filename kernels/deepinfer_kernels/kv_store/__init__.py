"""Write vectors into a paged cache as packed records, and read them back."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.kv_store.record_format import RecordFormat
from deepinfer_kernels.kv_store.reference import (
    gather_records_reference,
    pack_records_reference,
    store_records_reference,
    unpack_records_reference,
)
from deepinfer_kernels.kv_store.triton_kernel import (
    gather_records_triton,
    pack_records_triton,
    store_records_triton,
    unpack_records_triton,
)

__all__ = ["RecordFormat", "gather_records", "pack_records", "require_cache", "store_records", "unpack_records"]


def pack_records(x: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """Quantise vectors into contiguous records: values, then scales.

    Args:
        x: [..., width], bf16 or fp32; width a multiple of the group width of ``fmt``.
        fmt: form of the records.

    Returns:
        [..., record_bytes] uint8, a new tensor. An MXFP4 record is laid out like the others here; only pages
        of a cache are segregated.

    Raises:
        ShapeError: width does not divide into groups.
        UnsupportedError: ``x`` is neither bf16 nor fp32.

    Invariance: bitwise per vector.
    Source: spec section 6.1.
    """
    checks.require_activation("pack_records", "x", x)
    fmt.record_bytes(x.shape[-1])
    if use_triton(x):
        return pack_records_triton(x, fmt)
    return pack_records_reference(x, fmt)


def unpack_records(records: torch.Tensor, width: int, fmt: RecordFormat, dtype: torch.dtype) -> torch.Tensor:
    """Values of contiguous records, the inverse of ``pack_records``.

    Args:
        records: [..., record_bytes] uint8, any strides.
        width: elements of a vector.
        fmt: form of the records.
        dtype: of the result, bf16 or fp32; both hold every value of the quantised formats exactly.

    Returns:
        [..., width] ``dtype``, a new tensor.

    Raises:
        ShapeError: the last axis of ``records`` is not one record of ``fmt``.
        UnsupportedError: ``records`` is not uint8.

    Invariance: bitwise per record.
    Source: spec section 6.1.
    """
    checks.require_dtype("unpack_records", "records", records, (torch.uint8,))
    if records.shape[-1] != fmt.record_bytes(width):
        raise ShapeError(
            f"unpack_records: records has shape {list(records.shape)}, expected {fmt.record_bytes(width)} bytes in the "
            f"last axis for {width} elements of {fmt.value}; pass whole records"
        )
    if use_triton(records):
        return unpack_records_triton(records, width, fmt, dtype)
    return unpack_records_reference(records, width, fmt, dtype)


def store_records(kv_cache: torch.Tensor, slot_mapping: torch.Tensor, x: torch.Tensor, fmt: RecordFormat) -> None:
    """Quantise vectors and write each into its slot of a paged cache, in place.

    Args:
        kv_cache: [num_blocks, block_size, record_bytes] uint8. The last two axes are contiguous; blocks may lie any
            distance apart, so a cache may share its allocation with others. Bytes between blocks stay untouched.
        slot_mapping: [num_tokens] int64, block * block_size + offset; a negative slot writes nothing. No slot twice.
        x: [num_tokens, width], bf16 or fp32, any strides.
        fmt: form of the records; an MXFP4 page holds all values, then all scales.

    Raises:
        ShapeError: ``kv_cache`` is not a cache of such records, or ``slot_mapping`` does not fit ``x``.
        UnsupportedError: a dtype other than those above.

    Invariance: bitwise per vector; the bytes of a slot depend on its own vector only.
    Source: spec sections 6.1 and 6.3.
    """
    checks.require_activation("store_records", "x", x)
    if x.dim() != 2:
        raise ShapeError(
            f"store_records: x has shape {list(x.shape)}, expected [num_tokens, width]; flatten the leading axes"
        )
    require_cache("store_records", kv_cache, x.shape[1], fmt)
    if slot_mapping.shape != x.shape[:1]:
        raise ShapeError(
            f"store_records: slot_mapping has shape {list(slot_mapping.shape)}, expected [{x.shape[0]}], the first "
            f"axis of x {list(x.shape)}; pass one slot per row"
        )
    checks.require_dtype("store_records", "slot_mapping", slot_mapping, (torch.int64,))
    if use_triton(kv_cache):
        store_records_triton(kv_cache, slot_mapping, x, fmt)
        return
    store_records_reference(kv_cache, slot_mapping, x, fmt)


def gather_records(
    kv_cache: torch.Tensor, slots: torch.Tensor, width: int, fmt: RecordFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Read the vectors of any slots of a paged cache.

    Args:
        kv_cache: as in ``store_records``.
        slots: int64, any shape; a negative slot reads zeros and touches no record.
        width: elements of a vector.
        fmt: form of the records.
        dtype: of the result, bf16 or fp32.

    Returns:
        [*slots.shape, width] ``dtype``, a new tensor.

    Raises:
        ShapeError: ``kv_cache`` is not a cache of such records, or holds no block.
        UnsupportedError: a dtype other than those above.

    Invariance: bitwise per slot.
    Source: spec sections 6.1 and 6.3.
    """
    require_cache("gather_records", kv_cache, width, fmt)
    checks.require_dtype("gather_records", "slots", slots, (torch.int64,))
    if kv_cache.shape[0] == 0 or kv_cache.shape[1] == 0:
        raise ShapeError(
            f"gather_records: kv_cache has shape {list(kv_cache.shape)}, expected at least one slot; "
            "allocate the cache first"
        )
    if use_triton(kv_cache):
        return gather_records_triton(kv_cache, slots, width, fmt, dtype)
    return gather_records_reference(kv_cache, slots, width, fmt, dtype)


def require_cache(operation: str, kv_cache: torch.Tensor, width: int, fmt: RecordFormat) -> None:
    """Raise ShapeError or UnsupportedError unless ``kv_cache`` is a cache of such records, as in ``store_records``."""
    checks.require_dtype(operation, "kv_cache", kv_cache, (torch.uint8,))
    record_bytes = fmt.record_bytes(width)
    if kv_cache.dim() != 3 or kv_cache.shape[2] != record_bytes:
        raise ShapeError(
            f"{operation}: kv_cache has shape {list(kv_cache.shape)}, expected [num_blocks, block_size, "
            f"{record_bytes}] for {width} elements of {fmt.value}; pass the cache of this format"
        )
    if kv_cache.stride(2) != 1 or kv_cache.stride(1) != record_bytes:
        raise ShapeError(
            f"{operation}: kv_cache has strides {list(kv_cache.stride())}, expected the last two axes contiguous "
            f"([any, {record_bytes}, 1]); only the block stride may be larger"
        )
