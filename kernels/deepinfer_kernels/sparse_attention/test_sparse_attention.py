import pytest
import torch
from safetensors.torch import load_file

from deepinfer_kernels.errors import ShapeError, UnsupportedError
from deepinfer_kernels.kv_store import RecordFormat, store_records
from deepinfer_kernels.rope import cos_sin, inverse_frequencies, rope
from deepinfer_kernels.sparse_attention import sparse_attention
from deepinfer_kernels.sparse_attention.reference import make_inputs
from deepinfer_kernels.testing import assert_bitwise_equal, assert_close, require_golden, ulp_distance_bf16
from deepinfer_kernels.tiling import REFERENCE_KEY_TILE as TILE

HEADS, HEAD_DIM = 4, 32
SCALE = HEAD_DIM**-0.5
NATIVE = (RecordFormat.MXFP8, RecordFormat.NVFP4)
PLAIN = (RecordFormat.FP32, RecordFormat.FP32)


def _inputs(
    num_tokens: int, lengths: tuple[int, int], formats: tuple[RecordFormat, RecordFormat], device: str
) -> dict[str, torch.Tensor]:
    return make_inputs(num_tokens, HEADS, HEAD_DIM, lengths, formats, torch.Generator().manual_seed(4), device)


def _run(
    inputs: dict[str, torch.Tensor],
    formats: tuple[RecordFormat, RecordFormat] = PLAIN,
    *,
    round_p: bool = False,
    scale: float = SCALE,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> torch.Tensor:
    return sparse_attention(
        inputs["q"],
        inputs["window_cache"],
        inputs["window_slots"],
        inputs.get("compressed_cache"),
        inputs.get("compressed_slots"),
        inputs["sink"],
        scale,
        window_format=formats[0],
        compressed_format=formats[1],
        round_p=round_p,
        cos=cos,
        sin=sin,
    )


def _rows(inputs: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    by_row = {name: inputs[name][rows] for name in ("q", "window_slots", "compressed_slots")}
    return {**inputs, **by_row}


@pytest.mark.parametrize("window", [0, 1, 64, 100, 144])
@pytest.mark.parametrize("vectors", ["a", "b"])
def test_golden_rows_wherever_the_list_is_parted(vectors: str, window: int, device: str) -> None:
    golden = {k: v.to(device) for k, v in load_file(require_golden(f"kernels/vectors_{vectors}.safetensors")).items()}
    kv, slots = golden["attn.kv"], golden["attn.idx"].long()
    fmt = RecordFormat.FP32
    cache = torch.zeros(25, 8, fmt.record_bytes(64), dtype=torch.uint8, device=device)
    store_records(cache, torch.arange(200, device=device), kv, fmt)
    inputs = {
        "q": golden["attn.q"],
        "window_cache": cache,
        "window_slots": slots[:, :window],
        "compressed_cache": cache,
        "compressed_slots": slots[:, window:],
        "sink": golden["attn.sink"],
    }
    rounded = _run(inputs, round_p=True, scale=64**-0.5)
    assert int(ulp_distance_bf16(rounded, golden["attn.out"]).max()) <= 1
    exact = _run({**inputs, "q": golden["attn.q"].float()}, scale=64**-0.5)
    assert_close(exact, golden["attn.out_exact"], 1e-5, label="fp32")


@pytest.mark.parametrize("round_p", [False, True])
@pytest.mark.parametrize("formats", [NATIVE, PLAIN])
def test_every_row_keeps_its_bits_in_any_batch(
    formats: tuple[RecordFormat, RecordFormat], round_p: bool, device: str
) -> None:
    inputs = _inputs(33, (16, 90), formats, device)
    batch = _run(inputs, formats, round_p=round_p)
    alone = [_run(_rows(inputs, slice(t, t + 1)), formats, round_p=round_p) for t in range(33)]
    assert_bitwise_equal(batch, torch.cat(alone), label="each row alone")
    assert_bitwise_equal(_run(_rows(inputs, slice(5, 21)), formats, round_p=round_p), batch[5:21], label="5:21")


def test_rows_do_not_depend_on_the_chunk_they_fall_into(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(33, (16, 90), PLAIN, device)
    want = _run(inputs)
    monkeypatch.setattr("deepinfer_kernels.sparse_attention.reference._KEY_ELEMENTS", 7 * TILE * HEAD_DIM)
    assert_bitwise_equal(_run(inputs), want, label="chunks of 7 rows")


@pytest.mark.parametrize("length", [1, TILE - 1, TILE, TILE + 1])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_rows_are_softmax_with_a_sink(num_tokens: int, length: int, device: str) -> None:
    inputs = _inputs(num_tokens, (length, 8), PLAIN, device)
    got = _run(inputs)
    want = torch.zeros(num_tokens, HEADS, HEAD_DIM, dtype=torch.float64, device=device)
    for t in range(num_tokens):
        keys = [
            inputs[f"{part}_cache"].flatten(0, 1)[slots[slots >= 0]].contiguous().view(torch.float32)
            for part in ("window", "compressed")
            for slots in [inputs[f"{part}_slots"][t]]
        ]
        key = torch.cat(keys).double()
        scores = torch.cat([inputs["q"][t].double() @ key.t() * SCALE, inputs["sink"].double()[:, None]], dim=1)
        want[t] = scores.softmax(dim=1)[:, :-1] @ key
    assert (got.double() - want).abs().nan_to_num(nan=1.0).amax().item() < 1e-5 if num_tokens else got.shape[0] == 0
    assert not got[:1].any()  # row 0 lists nothing


def test_a_layer_without_compressed_entries_equals_an_empty_selection(device: str) -> None:
    inputs = _inputs(5, (16, 8), PLAIN, device)
    inputs["compressed_slots"].fill_(-1)
    want = _run(inputs)
    window_only = {name: inputs[name] for name in ("q", "sink", "window_cache", "window_slots")}
    assert_bitwise_equal(_run(window_only), want, label="None against all -1")
    longer = torch.nn.functional.pad(inputs["window_slots"], (0, 200), value=-1)
    assert_bitwise_equal(_run({**window_only, "window_slots": longer}), want, label="more -1 at the end")


def test_none_may_stand_anywhere_and_its_place_holds_nothing(device: str) -> None:
    inputs = _inputs(4, (16, 8), PLAIN, device)
    q, sink = inputs["q"], inputs["sink"]
    slots = inputs["window_slots"].flip(1)  # -1 first; all other slots of the caches hold NaN
    got = _run({"q": q, "sink": sink, "window_cache": inputs["window_cache"], "window_slots": slots})
    want = _run({"q": q, "sink": sink, "window_cache": inputs["window_cache"], "window_slots": slots.flip(1)})
    assert_close(got, want, 1e-5, label="-1 first")
    assert not got[0].any()


def test_large_scores_and_sinks_stay_finite(device: str) -> None:
    inputs = _inputs(6, (16, 70), PLAIN, device)
    inputs["q"] *= 1e4
    inputs["sink"][0], inputs["sink"][1] = 1e4, -1e4
    assert bool(_run(inputs).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_is_rounded_then_rotated_back(dtype: torch.dtype, device: str) -> None:
    inputs = _inputs(6, (16, 8), NATIVE, device)
    inputs["q"] = inputs["q"].to(dtype)
    cos, sin = cos_sin(torch.arange(100, 106), inverse_frequencies(16, 100.0, None))
    cos, sin = cos.to(device), sin.to(device)
    plain = _run(inputs, NATIVE, round_p=True)
    assert plain.dtype == dtype
    got = _run(inputs, NATIVE, round_p=True, cos=cos, sin=sin)
    assert_bitwise_equal(got, rope(plain, cos, sin, inverse=True), label="rotated back")
    assert not torch.equal(got, plain)


def test_rounding_p_changes_the_result(device: str) -> None:
    inputs = _inputs(6, (16, 8), PLAIN, device)
    assert not torch.equal(_run(inputs, round_p=True), _run(inputs))


def test_strided_arguments_give_the_same_bits(device: str) -> None:
    inputs = _inputs(9, (16, 70), NATIVE, device)
    want = _run(inputs, NATIVE)
    strided = dict(inputs)
    strided["q"] = inputs["q"].transpose(0, 1).contiguous().transpose(0, 1)
    for name in ("window", "compressed"):
        cache, slots = inputs[f"{name}_cache"], inputs[f"{name}_slots"]
        memory = torch.full((len(cache), cache[0].numel() + 13), 255, dtype=torch.uint8, device=device)
        memory[:, 13:] = cache.flatten(1)
        strided[f"{name}_cache"] = memory[:, 13:].as_strided(tuple(cache.shape), (memory.stride(0), cache.shape[2], 1))
        strided[f"{name}_slots"] = slots.t().contiguous().t()
    assert_bitwise_equal(_run(strided, NATIVE), want, label="strided")


def test_errors_name_operation_argument_and_rule() -> None:
    inputs = _inputs(3, (16, 8), PLAIN, "cpu")
    cases = [
        ({"q": inputs["q"][..., :20]}, r"q has shape \[3, 4, 20\], expected a multiple of 16"),
        ({"sink": inputs["sink"][1:]}, r"q has shape \[3, 4, 32\] and sink \[3\]"),
        ({"window_slots": inputs["window_slots"][1:]}, r"window_slots has shape \[2, 16\], expected \[3, length\]"),
        ({"compressed_slots": inputs["compressed_slots"][0]}, r"compressed_slots has shape \[8\]"),
    ]
    for change, message in cases:
        with pytest.raises(ShapeError, match=f"sparse_attention: {message}"):
            _run({**inputs, **change})
    with pytest.raises(ShapeError, match="sparse_attention: only one of compressed_cache"):
        _run({name: tensor for name, tensor in inputs.items() if name != "compressed_slots"})
    with pytest.raises(ShapeError, match="gather_records: kv_cache has shape"):
        _run(inputs, NATIVE)
    with pytest.raises(UnsupportedError, match=r"sparse_attention: q is torch.float16"):
        _run({**inputs, "q": inputs["q"].half()})
