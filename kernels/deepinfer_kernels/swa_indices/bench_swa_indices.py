"""Bench of window and entry slots: ``python -m deepinfer_kernels.swa_indices.bench_swa_indices``."""

from functools import partial

import torch

from deepinfer_kernels.bench import Case, run_bench
from deepinfer_kernels.bench_sizes import Sizes, integers
from deepinfer_kernels.swa_indices import entry_slots, window_slots

PAGE = 64
PAGES_OF_REQUEST = 64


def _table(device: str) -> torch.Tensor:
    return torch.randperm(PAGES_OF_REQUEST, device=device).int()[None]


def _window(num_rows: int, window: int) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        positions = integers(device, 0, PAGE * PAGES_OF_REQUEST, torch.int64, num_rows)
        req_idx = torch.zeros(num_rows, dtype=torch.int32, device=device)
        return partial(window_slots, positions, req_idx, _table(device), PAGE, window, torch.zeros_like(positions))

    return Case(
        op="swa_indices",
        name=f"window {num_rows} x {window}",
        num_bytes=num_rows * (8 * window + 20) + 4 * PAGES_OF_REQUEST,
        flops=4 * num_rows * window,
        make=make,
    )


def _entries(num_rows: int, length: int) -> Case:
    def make(device: str) -> partial[torch.Tensor]:
        indices = integers(device, -1, PAGE * PAGES_OF_REQUEST, torch.int32, num_rows, length)
        return partial(entry_slots, indices, torch.zeros(num_rows, device=device).int(), _table(device), PAGE)

    return Case(
        op="swa_indices",
        name=f"entries {num_rows} x {length}",
        num_bytes=num_rows * (12 * length + 4) + 4 * PAGES_OF_REQUEST,
        flops=4 * num_rows * length,
        make=make,
    )


def cases(sizes: Sizes) -> list[Case]:
    """Both lists, few and many rows."""
    windows = [_window(rows, sizes.sliding_window) for rows in sizes.rows]
    return windows + [_entries(rows, sizes.index_topk) for rows in sizes.rows]


if __name__ == "__main__":
    run_bench("swa_indices", cases)
