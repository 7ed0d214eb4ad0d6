"""Pool pairs of tokens into one compressed latent (ratio 2)."""

import torch

from deepinfer_kernels import checks
from deepinfer_kernels.dispatch import use_triton
from deepinfer_kernels.errors import ShapeError
from deepinfer_kernels.kv_compress.reference import compress_pairs_reference
from deepinfer_kernels.kv_compress.triton_kernel import compress_pairs_triton

__all__ = ["compress_pairs"]


def compress_pairs(
    latent: torch.Tensor,
    score: torch.Tensor,
    positions: torch.Tensor,
    req_idx: torch.Tensor,
    state_cache: torch.Tensor,
    state_block: torch.Tensor,
    *,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Close the pairs that end in this step and keep what the next steps need.

    A row at an odd position p pools positions (p - 1, p): per channel a softmax over the two scores weighs the two
    latents. Position p - 1 is the row before when that is the same request at p - 1, else the state of the request.
    Every row's latent and score are then written to the state, after all reads.

    Args:
        latent: [num_tokens, width] fp32. Rows of one request are adjacent, at consecutive positions.
        score: [num_tokens, width] fp32.
        positions: [num_tokens] int64, absolute.
        req_idx: [num_tokens] int32, row of ``state_block``; a negative value marks a padded row, which returns zeros
            and writes nothing.
        state_cache: [num_blocks, ring, 2 * width] fp32, changed in place: [latent | score] of position p at p % ring.
            Blocks may lie any distance apart.
        state_block: [num_reqs] int32, state block of each request; no block twice.
        out_dtype: bf16 or fp32.

    Returns:
        [num_tokens, width] ``out_dtype``, a new tensor: the pooled latent in rows of odd position (fp32 inside, rounded
        once), zeros in the others.

    Raises:
        ShapeError: arguments that do not fit each other.
        UnsupportedError: ``latent``, ``score`` or ``state_cache`` is not fp32, or ``out_dtype`` neither bf16 nor fp32.

    Invariance: bitwise per pair; the same bits whether the even token comes from this call or from the state, so any
    cut of a request into calls gives the same rows.
    Source: REF, class Compressor; spec section 2.6.
    """
    for name, tensor in (("latent", latent), ("score", score), ("state_cache", state_cache)):
        checks.require_dtype("compress_pairs", name, tensor, (torch.float32,))
    checks.require_out_dtype("compress_pairs", "out_dtype", out_dtype)
    if latent.dim() != 2 or score.shape != latent.shape:
        raise ShapeError(
            f"compress_pairs: score has shape {list(score.shape)}, expected that of latent {list(latent.shape)}, "
            "[num_tokens, width]; pass both halves of the projection"
        )
    for name, index in (("positions", positions), ("req_idx", req_idx)):
        if index.shape != latent.shape[:1]:
            raise ShapeError(
                f"compress_pairs: {name} has shape {list(index.shape)}, expected [{latent.shape[0]}], the first axis "
                f"of latent {list(latent.shape)}; pass one value per row"
            )
    _check_state(state_cache, latent.shape[1])
    if use_triton(latent):
        return compress_pairs_triton(latent, score, positions, req_idx, state_cache, state_block, out_dtype=out_dtype)
    return compress_pairs_reference(latent, score, positions, req_idx, state_cache, state_block, out_dtype=out_dtype)


def _check_state(state_cache: torch.Tensor, width: int) -> None:
    if state_cache.dim() != 3 or state_cache.shape[2] != 2 * width or state_cache.shape[1] < 1:
        raise ShapeError(
            f"compress_pairs: state_cache has shape {list(state_cache.shape)}, expected [num_blocks, ring, "
            f"{2 * width}]; a row holds latent and score"
        )
