"""Log-softmax in plain PyTorch, with elementwise additions only: their order is written here, not in a library."""

import torch

from deepinfer_kernels.tiling import LOGSUM_BLOCK, LOGSUM_CHUNK

# Largest |fp32 - fp64| seen over rows of 129,280 normal logits, times four.
ABSOLUTE_TOLERANCE = 8e-6


def make_inputs(num_rows: int, vocab_size: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """Logits with a spread of 4 and some -inf, the first column never: [num_rows, vocab_size] fp32."""
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    hidden = torch.rand(num_rows, vocab_size, generator=generator) < 0.05
    if vocab_size > 0:
        hidden[:, 0] = False
    return logits.masked_fill(hidden, -torch.inf).to(device)


def _halved(lanes: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis, a power of two: the upper half is added to the lower until one is left."""
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes


def _finite_largest(logits: torch.Tensor) -> torch.Tensor:
    """Largest value of each row, 0 for a row of nothing but -inf: [num_rows, 1]."""
    largest = logits.amax(dim=1, keepdim=True)
    return torch.where(largest == -torch.inf, 0.0, largest)


def _sum_of_chunk(chunk: torch.Tensor) -> torch.Tensor:
    largest = _finite_largest(chunk)
    lanes = chunk.new_zeros(chunk.shape[0], LOGSUM_BLOCK)
    for start in range(0, chunk.shape[1], LOGSUM_BLOCK):
        block = chunk[:, start : start + LOGSUM_BLOCK]
        lanes[:, : block.shape[1]] += torch.exp(block - largest)
    return _halved(lanes)


def _largest_and_log_sum(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """m, 0 for a row of nothing but -inf, and log(s): [num_rows, 1] each."""
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        return logits.new_zeros(num_rows, 1), logits.new_full((num_rows, 1), -torch.inf)
    chunks: tuple[torch.Tensor, ...] = torch.split(logits, LOGSUM_CHUNK, dim=1)
    sums = torch.cat([_sum_of_chunk(chunk) for chunk in chunks], dim=1)
    of_chunks = torch.cat([chunk.amax(dim=1, keepdim=True) for chunk in chunks], dim=1)
    largest = _finite_largest(of_chunks)
    sums = sums * torch.exp(of_chunks - largest)
    num_lanes = 1 << (len(chunks) - 1).bit_length()
    return largest, torch.log(_halved(torch.nn.functional.pad(sums, (0, num_lanes - len(chunks)))))


def log_sum_exp_reference(logits: torch.Tensor) -> torch.Tensor:
    """``log_sum_exp`` on checked arguments."""
    largest, log_sum = _largest_and_log_sum(logits)
    return (largest + log_sum)[:, 0]


def log_softmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """``log_softmax`` on checked arguments."""
    largest, log_sum = _largest_and_log_sum(logits)
    return torch.where(logits == -torch.inf, -torch.inf, logits - largest - log_sum)


def token_log_softmax_reference(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """``token_log_softmax`` on checked arguments."""
    largest, log_sum = _largest_and_log_sum(logits)
    chosen = logits.gather(1, token_ids)
    return torch.where(chosen == -torch.inf, -torch.inf, chosen - largest - log_sum)
