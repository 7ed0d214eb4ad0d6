"""Without a GPU: small cases of the kernels run in Triton's interpreter, in a process of its own."""

from deepinfer_kernels.testing import run_interpreted


def test_kernels_agree_with_the_references_in_the_interpreter() -> None:
    run_interpreted("interpreted")
