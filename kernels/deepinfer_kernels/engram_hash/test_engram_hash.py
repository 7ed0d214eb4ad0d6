"""The Engram hash: constants of the released and the small configurations, rows, and row independence."""

import re

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.engram_hash import EngramLayerHash, engram_layout, engram_rows
from deepinfer_kernels.engram_hash.reference import make_inputs
from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.testing import assert_bitwise_equal, require_golden

COMPRESSED_VOCAB_SIZE = 99092
# Spec, appendix A: primes of the released layers, and the rows of the compressed ids (4567, 123, 17, 5).
PRIMES = {
    1: """16000057 16000079 16000081 16000097 16000121 16000129 16000133 16000183 16000189 16000207 16000211 16000253
        16000277 16000289 16000307 16000321 16000339 16000381 16000393 16000399 16000403 16000409 16000447 16000463""",
    14: """16000477 16000487 16000499 16000507 16000511 16000573 16000609 16000627 16000667 16000669 16000693 16000697
        16000711 16000729 16000759 16000769 16000781 16000799 16000813 16000819 16000841 16000877 16000879 16000889""",
}
ROWS = {
    1: """3133280 20509424 43972875 56072664 67532483 82368554 97852166 119080753 134725305 150668718 175665620
        184771011 194425338 223843521 228708325 240215767 258128289 279444817 290991827 312913235 327582143 349667459
        363821465 376855980""",
    14: """6787929 17523380 37130116 55731141 73090819 91179528 110657661 113589283 133656821 148565810 168233932
        182316737 207915245 216391578 237622196 250524275 270747216 283958461 301895302 312015662 323211801 339732054
        354077206 377947649""",
}
MULTIPLIERS = {
    1: (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    14: (67716810739261, 51510806800915, 30921347202721, 82619226485591),
}
NUM_ROWS = {1: 384006168, 14: 384016682}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.fixture(scope="module")
def released() -> dict[int, EngramLayerHash]:
    return engram_layout([1, 14], 8, 4, 16_000_000, COMPRESSED_VOCAB_SIZE)


def constants(layer: EngramLayerHash, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    multipliers, primes, offsets = (
        torch.tensor(values, dtype=torch.int64, device=device)
        for values in (layer.multipliers, layer.primes, layer.offsets)
    )
    return multipliers, primes, offsets


def blocked_ids(ids: list[int], is_image: list[bool], pad: int) -> torch.Tensor:
    """c_0 ... c_3 of every position; the start of the sequence and image tokens block all that lies behind them."""
    table: list[list[int]] = []
    for p in range(len(ids)):
        row: list[int] = []
        is_blocked = False
        for s in range(4):
            is_blocked = is_blocked or p - s < 0 or is_image[p - s]
            row.append(pad if is_blocked else ids[p - s])
        table.append(row)
    return torch.tensor(table, dtype=torch.int64)


@pytest.mark.parametrize("layer_id", [1, 14])
def test_the_released_layout_is_the_one_of_the_specification(
    layer_id: int, released: dict[int, EngramLayerHash]
) -> None:
    layer = released[layer_id]
    assert list(layer.primes) == numbers(PRIMES[layer_id])
    assert layer.multipliers == MULTIPLIERS[layer_id]
    assert layer.num_rows == NUM_ROWS[layer_id]
    assert layer.offsets[0] == 0
    assert layer.offsets[-1] == layer.num_rows - layer.primes[-1]
    assert [b - a for a, b in zip(layer.offsets, layer.offsets[1:], strict=False)] == list(layer.primes[:-1])


@pytest.mark.parametrize(
    ("layer_ids", "start", "compressed", "primes", "multipliers", "num_rows"),
    [
        (
            [1, 4],
            1000,
            512,
            [(1009, 1013, 1019, 1021, 1031, 1033), (1039, 1049, 1051, 1061, 1063, 1069)],
            [
                (14831304026200453, 936705081716061, 6959601268494069, 14319439928568407),
                (15920565596405625, 975009545214551, 14254820516660309, 3668506406680991),
            ],
            [6126, 6332],
        ),
        (
            [1, 3],
            64,
            256,
            [(67, 71, 73, 79, 83, 89), (97, 101, 103, 107, 109, 113)],
            [
                (29662608052400909, 1873410163432121, 13919202536988139, 28638879857136817),
                (10655090275895937, 31608505986136395, 4210609209496719, 27210409204648803),
            ],
            [462, 630],
        ),
    ],
)
def test_the_small_layouts_are_those_of_the_specification(
    layer_ids: list[int],
    start: int,
    compressed: int,
    primes: list[tuple[int, ...]],
    multipliers: list[tuple[int, ...]],
    num_rows: list[int],
) -> None:
    layout = engram_layout(layer_ids, 2, 4, start, compressed)
    assert list(layout) == layer_ids
    assert [layer.primes for layer in layout.values()] == primes
    assert [layer.multipliers for layer in layout.values()] == multipliers
    assert [layer.num_rows for layer in layout.values()] == num_rows


def test_a_prime_start_is_itself_the_first_prime() -> None:
    assert engram_layout([0], 3, 2, 2, 10)[0].primes == (2, 3, 5)


@pytest.mark.parametrize("layer_id", [1, 14])
def test_the_rows_of_appendix_a(layer_id: int, released: dict[int, EngramLayerHash], device: str) -> None:
    ids = torch.tensor([[4567, 123, 17, 5]], dtype=torch.int64, device=device)
    rows = engram_rows(ids, *constants(released[layer_id], device))
    assert rows.dtype == torch.int32
    assert rows[0].tolist() == numbers(ROWS[layer_id])


@pytest.mark.parametrize("file", ["a", "b"])
@pytest.mark.parametrize(("index", "layer_id"), [(0, 1), (1, 14)])
def test_the_golden_rows_with_an_image_gap(
    file: str, index: int, layer_id: int, released: dict[int, EngramLayerHash], device: str
) -> None:
    golden = load_file(require_golden(f"kernels/vectors_{file}.safetensors"))
    layer = released[layer_id]
    assert list(layer.multipliers) == golden["engram.multipliers"][index].tolist()
    assert list(layer.primes) == golden["engram.primes"][index].flatten().tolist()
    is_image = golden["engram.is_image"].bool()
    assert is_image.any()
    ids = blocked_ids(golden["engram.compressed_ids"].tolist(), is_image.tolist(), int(golden["engram.pad"]))
    rows = engram_rows(ids.to(device), *constants(layer, device))
    assert_bitwise_equal(rows, golden[f"engram.rows.layer{layer_id}"], label=f"rows of layer {layer_id}")


def test_the_largest_ids_stay_inside_the_table(released: dict[int, EngramLayerHash], device: str) -> None:
    ids = torch.full((1, 4), COMPRESSED_VOCAB_SIZE - 1, dtype=torch.int64, device=device)
    for layer in released.values():
        rows = engram_rows(ids, *constants(layer, device))[0].tolist()
        for row, prime, offset in zip(rows, layer.primes, layer.offsets, strict=True):
            assert offset <= row < offset + prime


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17])
def test_every_row_keeps_its_bits_in_any_batch(
    num_tokens: int, released: dict[int, EngramLayerHash], device: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = make_inputs(num_tokens, COMPRESSED_VOCAB_SIZE, 4, generator, device)
    arguments = constants(released[14], device)
    batch = engram_rows(ids, *arguments)
    assert batch.shape == (num_tokens, 24)
    for t in range(num_tokens):
        assert_bitwise_equal(batch[t : t + 1], engram_rows(ids[t : t + 1], *arguments), label=f"row {t}")


def test_strided_ids_hash_like_contiguous_ones(released: dict[int, EngramLayerHash], device: str) -> None:
    ids = make_inputs(9, COMPRESSED_VOCAB_SIZE, 8, torch.Generator().manual_seed(2), device)[:, ::2]
    arguments = constants(released[1], device)
    assert not ids.is_contiguous()
    assert_bitwise_equal(engram_rows(ids, *arguments), engram_rows(ids.contiguous(), *arguments), label="strided")


def test_arguments_that_do_not_fit_are_named() -> None:
    ids, four, six = (torch.zeros(shape, dtype=torch.int64) for shape in ((3, 4), (4,), (6,)))
    with pytest.raises(ShapeError, match=re.escape("engram_rows: multipliers is [3], expected [4]; one per")):
        engram_rows(ids, four[:3], six, six)
    with pytest.raises(ShapeError, match=re.escape("engram_rows: primes is [4], expected max_ngram - 1 columns per")):
        engram_rows(ids, four, four, four)
    with pytest.raises(ShapeError, match=re.escape("engram_rows: offsets is [5], expected [6]; one per prime")):
        engram_rows(ids, four, six, six[:5])
    with pytest.raises(ShapeError, match=re.escape("engram_rows: primes is [6], expected max_ngram - 1 columns")):
        engram_rows(ids[:, :1], four, six, six)
    with pytest.raises(UnsupportedError, match=re.escape("engram_rows: compressed_ids is torch.int32, expected")):
        engram_rows(ids.int(), four, six, six)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1], 0, 4, 64, 256), "engram_layout: num_heads is 0, expected >= 1; correct config.json"),
        (([1], 2, 1, 64, 256), "engram_layout: max_ngram is 1, expected >= 2"),
        (([1], 2, 4, 1, 256), "engram_layout: vocab_start is 1, expected >= 2"),
        (([1], 2, 4, 64, 0), "engram_layout: compressed_vocab_size is 0, expected >= 1"),
        (([1, 1], 2, 4, 64, 256), "engram_layout: layer_ids is [1, 1], expected distinct ids >= 0"),
        (([-1], 2, 4, 64, 256), "engram_layout: layer_ids is [-1], expected distinct ids >= 0"),
        (([1], 64, 4, 16_000_000, 256), "rows long, expected <= 2147483647 (rows are int32)"),
    ],
)
def test_a_layout_out_of_range_is_an_error(arguments: tuple[list[int], int, int, int, int], text: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(text)):
        engram_layout(*arguments)


@pytest.mark.parametrize(
    ("name", "layer_ids", "start", "vocab_size"), [("tiny", [1, 4], 1000, 512), ("nano", [1, 3], 64, 256)]
)
def test_the_recorded_rows_of_the_small_checkpoints(
    name: str, layer_ids: list[int], start: int, vocab_size: int, device: str
) -> None:
    tokens = load_file(require_golden(f"{name}-s0/prefill.safetensors"))["seq0.tokens"][:41].tolist()
    golden = load_file(require_golden(f"{name}-s0/layers_s32.safetensors"))
    ids = blocked_ids(tokens, [False] * 41, pad=2).to(device)  # the token map of these checkpoints is the identity
    for layer_id, layer in engram_layout(layer_ids, 2, 4, start, vocab_size).items():
        rows = engram_rows(ids, *constants(layer, device)).cpu()
        assert_bitwise_equal(rows[:40], golden[f"engram_rows.L{layer_id}"], label=f"prefill rows of {layer_id}")
        assert_bitwise_equal(rows[40:], golden[f"step.engram_rows.L{layer_id}"], label=f"step row of {layer_id}")
