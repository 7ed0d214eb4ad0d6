"""Our NumPy stand-ins write what vLLM's kernels write. In a child process: Triton's interpreter must not leak."""

import subprocess
import sys

import pytest

from deepinfer_plugin import envs

PROGRAM = """
from deepinfer_plugin.platforms.detect import platform_class

platform_class()
import sys

import torch
from vllm.v1.worker.gpu import block_table
from vllm.v1.worker import utils
from deepinfer_plugin.worker import cpu_kernels as ours

NUM_SLOTS, NUM_GROUPS, WIDTH = 9, 3, 40
generator = torch.Generator().manual_seed(3)


def integers(low, high, *shape, dtype=torch.int32):
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def addresses(tensors):
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.uint64)


def gather(kernel):
    source = [integers(1, 99, NUM_SLOTS, WIDTH) for _ in range(NUM_GROUPS)]
    target = [torch.full((NUM_SLOTS, WIDTH), 7, dtype=torch.int32) for _ in range(NUM_GROUPS)]
    arguments = (
        torch.tensor([4, 0, 8, 3]), addresses(source), addresses(target),
        torch.full((NUM_GROUPS,), WIDTH, dtype=torch.int64), integers(0, WIDTH, NUM_GROUPS, NUM_SLOTS), NUM_SLOTS, 4,
        integers(0, 900, NUM_SLOTS), torch.tensor([127, 0, 15], dtype=torch.int32),
        torch.tensor([32, 128, 16], dtype=torch.int32),
    )
    for masked in (True, False):
        kernel(*arguments, MASK_SLIDING_WINDOW=masked, BLOCK_SIZE=1024)
    return target


def slots(kernel):
    tables = [integers(1, 99, NUM_SLOTS, WIDTH) for _ in range(NUM_GROUPS)]
    out = torch.full((NUM_GROUPS, 64), 5, dtype=torch.int64)
    kernel(
        64, torch.tensor([4, 0, 8]), torch.tensor([0, 1, 6, 20, 20], dtype=torch.int32), integers(0, 500, 64).long(),
        addresses(tables), torch.full((NUM_GROUPS,), WIDTH, dtype=torch.int64),
        torch.tensor([32, 128, 8], dtype=torch.int32), torch.tensor([True, True, False]), torch.tensor([False] * 3),
        out, 64, 0, CP_SIZE=1, CP_INTERLEAVE=1, PAD_ID=-1, TRITON_BLOCK_SIZE=1024,
    )
    return [out]


def zeros(kernel):
    pool = integers(1, 99, 4000)
    kernel(
        addresses([pool, pool[40:]]).long(), torch.tensor([200, 200]), torch.tensor([40, 100]), torch.tensor([3, 0, 7]),
        BLOCK_SIZE=1024,
    )
    return [pool]


CASES = {
    "gather": (gather, block_table._gather_block_tables_kernel, (NUM_GROUPS, NUM_SLOTS), ours.gather_block_tables),
    "slots": (slots, block_table._compute_slot_mappings_kernel, (NUM_GROUPS, 4), ours.compute_slot_mappings),
    "zeros": (zeros, utils._zero_kv_blocks_kernel, (3, 2, 1), ours.zero_kv_blocks),
}
run, theirs, grid, mine = CASES[sys.argv[1]]
results = []
for kernel in (theirs[grid], mine):
    generator.manual_seed(3)
    results.append(run(kernel))
assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), results
print("equal", sum(t.numel() for t in results[0]))
"""


@pytest.mark.parametrize("case", ["gather", "slots", "zeros"])
def test_a_stand_in_writes_what_the_interpreted_kernel_writes(case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, case], env=envs.child_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1].startswith("equal ")
