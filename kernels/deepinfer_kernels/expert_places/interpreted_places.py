"""The kernel in Triton's interpreter, integer by integer against the reference; no GPU.

``TRITON_INTERPRET=1 python -m deepinfer_kernels.expert_places.interpreted_places`` raises on the first difference and
prints how often the kernel was launched.
"""

from itertools import product

import torch

from deepinfer_kernels import tiling
from deepinfer_kernels.expert_places.reference import expert_places_reference, make_inputs
from deepinfer_kernels.expert_places.triton_kernel import expert_places_triton
from deepinfer_kernels.interpreted_bounds import checked_bounds
from deepinfer_kernels.testing import assert_bitwise_equal

TOP_K, NUM_EXPERTS, NUM_SLOTS, PER_RANK = 3, 9, 15, 5


def run() -> int:
    """Rows that end in the middle of a block and behind one, with and without table, counts and rows of no expert."""
    rows_of_block = tiling.PLACES_BLOCK // TOP_K
    generator = torch.Generator().manual_seed(3)
    with checked_bounds() as launches:
        for num_rows, has_table, num_counted in product(
            (0, 1, 7, 2 * rows_of_block + 1), (False, True), (None, 5, 0, 400)
        ):
            ids, *tables, is_real = make_inputs(num_rows, TOP_K, NUM_EXPERTS, NUM_SLOTS, generator, "cpu")
            ids[5:7] = -1
            table, num_replicas = tables if has_table else (None, None)
            memory, real = torch.zeros(2, NUM_SLOTS, 2, dtype=torch.int32), None
            if num_counted is not None:
                real = torch.ones(num_counted, TOP_K, dtype=torch.int32)
                real[:num_rows] = is_real[:num_counted]
            results = []
            for function, counts in zip((expert_places_triton, expert_places_reference), memory[:, :, 1], strict=True):
                arguments = (table, num_replicas, real, None if real is None else counts)
                results.append(function(ids, PER_RANK, 1, *arguments))
            for got, want, label in zip(*results, ("slots", "here", "owner"), strict=True):
                assert_bitwise_equal(got, want, label)
            assert_bitwise_equal(memory[0], memory[1], "counts")
            assert bool(memory.any()) == (num_rows > 0 and num_counted not in (None, 0)), "what was counted"
    return launches.total()


if __name__ == "__main__":
    print("launches", run())  # noqa: T201
