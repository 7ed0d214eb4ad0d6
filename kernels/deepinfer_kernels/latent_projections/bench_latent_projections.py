"""Bench of the latent queries and keys: ``python -m deepinfer_kernels.latent_projections.bench_latent_projections``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, bf16, mxfp8_weight
from deepinfer_kernels.latent_projections import latent_projections
from deepinfer_kernels.tiling import MX_BLOCK


def _case(num_rows: int, sizes: Sizes) -> Case:
    depth, q_rank, kv_width = sizes.hidden_size, sizes.q_lora_rank, sizes.head_dim
    both = q_rank + kv_width

    def make(device: str) -> partial[tuple[torch.Tensor, torch.Tensor]]:
        weight, scale = mxfp8_weight(device, both, depth)
        blocks = q_rank // MX_BLOCK
        query, key = (weight[:q_rank], scale[:blocks]), (weight[q_rank:], scale[blocks:])
        norms = bf16(device, q_rank), bf16(device, kv_width)
        rows = bf16(device, num_rows, depth)  # any bf16 rows are prepared rows of something
        return partial(latent_projections, rows, query, key, *norms, 1e-20, out_dtype=torch.bfloat16, quantize=True)

    return Case(
        op="latent_projections",
        name=f"[{both} x {depth}] {num_rows} rows",
        num_bytes=both * depth + both * depth // 1024 + 2 * (num_rows * (depth + both) + both),
        flops=2 * num_rows * both * depth,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Few and many rows."""
    return [_case(rows, sizes) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("latent_projections", cases)
