"""NumPy stand-ins for the three kernels of vLLM's model runner that cost most of a step in Triton's interpreter.

They move integers and zero bytes; no arithmetic of the model is in them. vLLM offers the hook for it:
``Platform.register_triton_kernel_overrides``. A test runs each beside vLLM's own kernel.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]


def _int32_at(address: int, *shape: int) -> Int32Array:
    """The int32 values at an address, as an array of this shape that shares their memory."""
    count = int(np.prod(shape))
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)).reshape(shape)


def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens: torch.Tensor,
    sliding_window_reach: torch.Tensor,
    block_sizes: torch.Tensor,
    MASK_SLIDING_WINDOW: bool,
    BLOCK_SIZE: int,
) -> None:
    """Copy the batch's block-table rows, with 0 for blocks that lie wholly below a request's window.

    Rows behind the batch become 0: the launch grid, which says how many are stale, does not reach this function.
    """
    del num_blocks_stride, BLOCK_SIZE
    rows = batch_idx_to_req_idx.numpy()[:num_reqs]
    num_slots = num_blocks.shape[1]
    for group in range(num_blocks.shape[0]):
        stride = int(block_table_strides[group])
        source = _int32_at(int(src_block_table_ptrs[group]), num_slots, stride)
        target = _int32_at(int(dst_block_table_ptrs[group]), num_slots, stride)
        count = num_blocks[group].numpy()[rows]
        column = np.arange(stride)
        first = np.zeros(len(rows), dtype=np.int64)
        reach = int(sliding_window_reach[group])
        if MASK_SLIDING_WINDOW and reach > 0:
            first = np.maximum(num_computed_tokens.numpy()[rows] - reach, 0) // int(block_sizes[group])
        is_copied = column < count[:, None]
        is_live = is_copied & (column >= first[:, None])
        np.copyto(target[:num_reqs], np.where(is_live, source[rows], 0), where=is_copied)
        target[num_reqs:] = 0


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> None:
    """Token slot of every row in every group; ``PAD_ID`` behind the batch and for groups without slots."""
    del dcp_sharded, slot_mappings_stride, cp_rank, CP_INTERLEAVE, TRITON_BLOCK_SIZE
    assert CP_SIZE == 1, "the CPU platform has no context parallelism"
    starts = query_start_loc.numpy()
    num_reqs = idx_mapping.shape[0]
    num_tokens = int(starts[num_reqs])
    request = np.repeat(idx_mapping.numpy(), np.diff(starts[: num_reqs + 1]))
    position = pos.numpy()[:num_tokens].astype(np.int64)
    for group in range(slot_mappings.shape[0]):
        out = slot_mappings[group].numpy()
        out[num_tokens:max_num_tokens] = PAD_ID
        if not bool(slot_mapping_enabled[group]):
            out[:num_tokens] = PAD_ID
            continue
        stride, size = int(block_table_strides[group]), int(block_sizes[group])
        num_rows = int(idx_mapping.max()) + 1
        table = _int32_at(int(block_table_ptrs[group]), num_rows, stride)
        block = table[request, position // size].astype(np.int64)
        out[:num_tokens] = np.where(request >= 0, block * size + position % size, PAD_ID)


def zero_kv_blocks(
    seg_addrs: torch.Tensor,
    seg_block_strides: torch.Tensor,
    seg_page_sizes: torch.Tensor,
    block_ids: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Zero the pages of these blocks in every segment; sizes and strides count int32 values."""
    del BLOCK_SIZE
    for segment in range(seg_addrs.shape[0]):
        stride, size = int(seg_block_strides[segment]), int(seg_page_sizes[segment])
        for block in block_ids.tolist():
            ctypes.memset(int(seg_addrs[segment]) + block * stride * 4, 0, size * 4)


OVERRIDES: dict[str, Callable[..., Any]] = {
    "vllm.v1.worker.gpu.block_table._gather_block_tables_kernel": gather_block_tables,
    "vllm.v1.worker.gpu.block_table._compute_slot_mappings_kernel": compute_slot_mappings,
    "vllm.v1.worker.utils._zero_kv_blocks_kernel": zero_kv_blocks,
}
