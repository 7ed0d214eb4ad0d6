"""The kernels of the sampler on the device: every row alone and in any batch, and the bits of the references."""

from collections.abc import Callable

import pytest
import torch

from deepinfer_kernels.restrict_logits import reference as restrict_reference
from deepinfer_kernels.restrict_logits import restrict_logits
from deepinfer_kernels.row_testing import NEEDS_GPU, assert_graph_gives_eager_bits
from deepinfer_kernels.sample_tokens import reference as sample_reference
from deepinfer_kernels.sample_tokens import sample_tokens, top_tokens
from deepinfer_kernels.sampling_noise import gumbel_noise, random_words
from deepinfer_kernels.sampling_noise import reference as noise_reference
from deepinfer_kernels.sum_smaller_probs import sum_smaller_probs
from deepinfer_kernels.sum_smaller_probs.reference import sum_smaller_probs_reference
from deepinfer_kernels.testing import assert_bitwise_equal
from deepinfer_kernels.tiling import RESTRICT_FEW_ROWS

pytestmark = NEEDS_GPU

VOCABULARY = 129280
NUM_ROWS, NUM_COPIES = 128, 4  # 512 rows in the largest batch
NUM_TOP = 20
SIZES = (1, 2, 7, RESTRICT_FEW_ROWS, RESTRICT_FEW_ROWS + 1, 64, 129, 131, 133, 256, 511)
# On both sides of a call of the generator, of a group of the best tokens, of a chunk of the draw, and of a chunk and a
# block of the restriction.
VOCABULARIES = (1, 3, 4, 5, 63, 65, 1023, 1024, 1025, 2048, 2049, 4095, 4096, 4097, 8193, 50000)

Inputs = tuple[torch.Tensor, ...]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=_generator(seed)) * 3


def _draw_inputs(num_rows: int, vocab_size: int) -> Inputs:
    logits, *rest = sample_reference.make_inputs(num_rows, vocab_size, _generator(1), "cpu")
    logits[::2] = _normal(num_rows, vocab_size, 2)[::2]
    return (logits, *rest)


def _restrict_inputs(num_rows: int, vocab_size: int) -> Inputs:
    logits, *rest = restrict_reference.make_inputs(num_rows, vocab_size, _generator(3), "cpu")
    logits[::2] = _normal(num_rows, vocab_size, 4)[::2]
    return (logits, *rest)


def _sum_inputs(num_rows: int, vocab_size: int) -> Inputs:
    logits = _restrict_inputs(num_rows, vocab_size)[0]
    return logits, torch.randint(0, vocab_size, (num_rows,), generator=_generator(5))


def _top_inputs(num_rows: int, vocab_size: int) -> Inputs:
    return (_draw_inputs(num_rows, vocab_size)[0],)


def _top(logits: torch.Tensor) -> torch.Tensor:
    return top_tokens(logits, min(NUM_TOP, logits.shape[1]))


def _top_reference(logits: torch.Tensor) -> torch.Tensor:
    return sample_reference.top_tokens_reference(logits, min(NUM_TOP, logits.shape[1]))


Operation = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], Callable[[int, int], Inputs]]
OPERATIONS: dict[str, Operation] = {
    "draw": (sample_tokens, sample_reference.sample_tokens_reference, _draw_inputs),
    "restrict": (restrict_logits, restrict_reference.restrict_logits_reference, _restrict_inputs),
    "sum": (sum_smaller_probs, sum_smaller_probs_reference, _sum_inputs),
    "top": (_top, _top_reference, _top_inputs),
}


def _on_device(inputs: Inputs) -> Inputs:
    return tuple(tensor.cuda() for tensor in inputs)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_row_keeps_its_bits_alone_and_in_any_batch(name: str) -> None:
    run, _, make = OPERATIONS[name]
    inputs = tuple(torch.cat([x] * NUM_COPIES) for x in _on_device(make(NUM_ROWS, VOCABULARY)))
    batch = run(*inputs)
    assert_bitwise_equal(batch, torch.cat([batch[:NUM_ROWS]] * NUM_COPIES), f"{name}: copies of a row in one batch")
    for row in range(NUM_ROWS):
        assert_bitwise_equal(run(*(x[row : row + 1] for x in inputs)), batch[row : row + 1], f"{name}: row {row} alone")
    for size in SIZES:
        assert_bitwise_equal(run(*(x[:size] for x in inputs)), batch[:size], f"{name}: first {size} rows")
        assert_bitwise_equal(run(*(x[-size:] for x in inputs)), batch[-size:], f"{name}: last {size} rows")


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_released_vocabulary_has_the_bits_of_the_reference(name: str) -> None:
    run, reference, make = OPERATIONS[name]
    inputs = make(24, VOCABULARY)
    assert_bitwise_equal(run(*_on_device(inputs)).cpu(), reference(*inputs), f"{name}: device against CPU")
    same_device = reference(*_on_device(inputs))
    assert_bitwise_equal(run(*_on_device(inputs)), same_device, f"{name}: kernel against the reference on the device")


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_other_vocabularies_have_the_bits_of_the_reference(name: str, vocab_size: int) -> None:
    run, reference, make = OPERATIONS[name]
    inputs = make(33, vocab_size)
    got = run(*_on_device(inputs))
    assert_bitwise_equal(got.cpu(), reference(*inputs), f"{name} over {vocab_size}")
    few = run(*(x[:RESTRICT_FEW_ROWS] for x in _on_device(inputs)))
    assert_bitwise_equal(few, got[:RESTRICT_FEW_ROWS], f"{name} over {vocab_size}, few rows")
    padded = [torch.full((33, vocab_size + 5), torch.nan, device="cuda"), *_on_device(inputs[1:])]
    padded[0][:, 2 : 2 + vocab_size] = inputs[0].cuda()
    strided = run(padded[0][:, 2 : 2 + vocab_size], *padded[1:])
    assert_bitwise_equal(strided, got, f"{name} over {vocab_size}: rows of a wider matrix, NaN beside them")


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_graph_gives_the_bits_of_the_eager_call(name: str) -> None:
    run, _, make = OPERATIONS[name]
    inputs = _on_device(make(5, VOCABULARY))
    assert_graph_gives_eager_bits(lambda: run(*inputs), name)


def test_words_and_noise_have_the_bits_of_the_reference() -> None:
    for vocab_size in (*VOCABULARIES, VOCABULARY):
        seeds, prompts, positions = noise_reference.make_inputs(5, _generator(6), "cpu")
        on_device = seeds.cuda(), prompts.cuda(), positions.cuda()
        words = random_words(*on_device, vocab_size)
        want = noise_reference.random_words_reference(seeds, prompts, positions, vocab_size)
        assert_bitwise_equal(words.cpu(), want, f"words of {vocab_size} tokens")
        noise = gumbel_noise(*on_device, vocab_size)
        want = noise_reference.gumbel_noise_reference(seeds, prompts, positions, vocab_size)
        assert_bitwise_equal(noise.cpu(), want, f"noise of {vocab_size} tokens")


# Shapes of a row on which a search by logits goes slowly or not at all.
HARD_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all equal": lambda x: torch.full_like(x, 1.5),
    "one far away": lambda x: torch.cat((x[:, :-1], torch.full_like(x[:, :1], 3e38)), dim=1),
    "every magnitude": lambda x: torch.sign(x) * torch.exp2(x * 30),
    "infinite": lambda x: x.masked_fill(x > 11.0, torch.inf),
    "two values": lambda x: (x > 0).float(),
    "mostly hidden": lambda x: x.masked_fill(x < 9.0, -torch.inf),
    "nothing": lambda x: torch.full_like(x, -torch.inf),
    "denormal": lambda x: x * 1e-41,
}


@pytest.mark.parametrize("shape", HARD_ROWS)
def test_hard_rows_are_cut_where_the_reference_cuts(shape: str) -> None:
    num_rows = 12
    logits = HARD_ROWS[shape](_normal(num_rows, VOCABULARY, 7))
    top_k = torch.tensor([0, 1, 5, 64640, 129279, 0, 0, 0, 50, 5000, 129000, 3])
    top_p = torch.tensor([0.9, 1.0, 1.0, 1.0, 1.0, 0.5, 1e-9, 0.999999, 0.3, 0.7, 0.5, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.01, 0.0, 1e-30, 0.2, 0.0, 0.0, 1.5])
    want = restrict_reference.restrict_logits_reference(logits, top_k, top_p, min_p)
    for copies in (1, RESTRICT_FEW_ROWS // num_rows + 1):  # many programs a row, and one
        got = restrict_logits(*(x.cuda().repeat_interleave(copies, 0) for x in (logits, top_k, top_p, min_p)))
        assert_bitwise_equal(got.cpu(), want.repeat_interleave(copies, 0), f"{shape}, {copies} copies")
    ids = torch.arange(num_rows) * 1000
    got = sum_smaller_probs(logits.cuda(), ids.cuda())
    assert_bitwise_equal(got.cpu(), sum_smaller_probs_reference(logits, ids), f"sum of {shape}")
    for num_tokens in (1, 32, 33, 128, 129):
        want = sample_reference.top_tokens_reference(logits, num_tokens)
        assert_bitwise_equal(top_tokens(logits.cuda(), num_tokens).cpu(), want, f"best {num_tokens} of {shape}")
