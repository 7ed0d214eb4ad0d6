"""The Engram hash as one Triton kernel, in 64-bit integers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

_BLOCK_T = 32


@triton.jit(do_not_specialize=["num_tokens"])
def _engram_rows_kernel(
    ids_ptr,
    multipliers_ptr,
    primes_ptr,
    offsets_ptr,
    out_ptr,
    num_tokens,
    ids_stride_t,
    ids_stride_s,
    MAX_NGRAM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    head = tl.arange(0, BLOCK_HEADS)
    is_head = head < NUM_HEADS
    mixed = tl.load(ids_ptr + token * ids_stride_t, mask=is_token, other=0) * tl.load(multipliers_ptr)
    for distance in tl.static_range(1, MAX_NGRAM):
        compressed_id = tl.load(ids_ptr + token * ids_stride_t + distance * ids_stride_s, mask=is_token, other=0)
        mixed = mixed ^ (compressed_id * tl.load(multipliers_ptr + distance))
        column = (distance - 1) * NUM_HEADS + head
        prime = tl.load(primes_ptr + column, mask=is_head, other=1)
        offset = tl.load(offsets_ptr + column, mask=is_head, other=0)
        row = mixed[:, None] % prime[None, :] + offset[None, :]
        out = out_ptr + token[:, None] * ((MAX_NGRAM - 1) * NUM_HEADS) + column[None, :]
        tl.store(out, row.to(tl.int32), mask=is_token[:, None] & is_head[None, :])


def engram_rows_triton(
    compressed_ids: torch.Tensor, multipliers: torch.Tensor, primes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Launch the kernel on arguments ``engram_rows`` has checked."""
    num_tokens, max_ngram = compressed_ids.shape
    num_heads = primes.shape[0] // (max_ngram - 1)
    out = torch.empty((num_tokens, primes.shape[0]), dtype=torch.int32, device=compressed_ids.device)
    if num_tokens > 0:
        _engram_rows_kernel[(triton.cdiv(num_tokens, _BLOCK_T),)](
            compressed_ids,
            multipliers.contiguous(),
            primes.contiguous(),
            offsets.contiguous(),
            out,
            num_tokens,
            compressed_ids.stride(0),
            compressed_ids.stride(1),
            MAX_NGRAM=max_ngram,
            NUM_HEADS=num_heads,
            BLOCK_HEADS=triton.next_power_of_2(num_heads),
            BLOCK_T=_BLOCK_T,
        )
    return out
