"""Where a kernel rounds is where the reference rounds: equal bits on inputs whose sums are exact in any order."""

import pytest
import torch

from deepinfer_kernels.exact_inputs import PACKED, PLAIN, Case, rounded
from deepinfer_kernels.exact_inputs_paths import PACKED_PATHS, PLAIN_PATHS
from deepinfer_kernels.testing import assert_bitwise_equal, run_interpreted

CASES: dict[str, Case] = {**PLAIN, **PACKED, **PLAIN_PATHS, **PACKED_PATHS}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_exact_inputs_give_the_written_out_bits(name: str, dtype: torch.dtype, device: str) -> None:
    if dtype == torch.float32 and name.endswith("bf16"):
        pytest.skip("fp32 rows round nowhere in between")
    got, want = CASES[name](device, dtype)
    assert_bitwise_equal(got.cpu(), want, name)


def test_triton_kernels_give_them_in_the_interpreter() -> None:
    words = run_interpreted("interpreted_exact").split()
    assert words == ["launches", words[-1]]
    assert int(words[-1]) >= len(PLAIN)


def test_a_case_with_inexact_values_is_refused() -> None:
    with pytest.raises(AssertionError, match="not exact in fp32"):
        rounded(torch.tensor([1 / 3], dtype=torch.float64), torch.float32)
