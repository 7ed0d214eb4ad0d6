"""The fp32 cases of ``exact_inputs`` through the Triton kernels in Triton's interpreter; no GPU.

``TRITON_INTERPRET=1 python -m deepinfer_kernels.interpreted_exact`` raises on the first differing bit and prints how
many kernels it launched. bf16 cases need a GPU: the interpreter keeps bf16 as integers and cannot multiply it.
"""

from collections import Counter
from typing import Any
from unittest.mock import patch

import torch

from deepinfer_kernels import dispatch


def run() -> int:
    """Send every operation to its kernel, check all cases that run without a GPU; returns the number of launches."""
    # Before the operations are imported: they bind the name.
    with patch.object(dispatch, "use_triton", return_value=True):
        from triton.runtime.interpreter import GridExecutor

        from deepinfer_kernels.exact_inputs import PLAIN
        from deepinfer_kernels.exact_inputs_paths import PLAIN_PATHS
        from deepinfer_kernels.testing import assert_bitwise_equal

        launches: Counter[str] = Counter()
        launch = GridExecutor.__call__

        def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
            launches[executor.fn.__name__] += 1
            return launch(executor, *args, **kwargs)

        with patch.object(GridExecutor, "__call__", counted):
            for name, case in (PLAIN | PLAIN_PATHS).items():
                got, want = case("cpu", torch.float32)
                assert_bitwise_equal(got, want, name)
    return launches.total()


if __name__ == "__main__":
    print("launches", run())  # noqa: T201
