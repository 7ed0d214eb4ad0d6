"""Inputs on which every sum is exact in any order, and what the operations must return on them, to the bit.

For tests. Values have so few bits that all partial sums fit fp32, also where tensor cores cut off what lies below the
last bit: kernels and references may then differ in nothing but the places where they round. Expected values come from
double precision with these places written out. Attention, index and experts are in ``exact_inputs_paths``.
"""

from collections.abc import Callable

import torch

from deepinfer_kernels.engram_gate import engram_gate
from deepinfer_kernels.hc_collapse import hc_collapse
from deepinfer_kernels.hc_mix import hc_mix
from deepinfer_kernels.hc_post import hc_post
from deepinfer_kernels.kv_compress import compress_pairs
from deepinfer_kernels.linear import dequantize_blocks, grouped_linear, linear, mxfp8_linear
from deepinfer_kernels.moe_combine import moe_combine
from deepinfer_kernels.mxfp8_quant.reference import mxfp8_fake_quant_reference
from deepinfer_kernels.rms_norm import rms_norm
from deepinfer_kernels.rope import rope
from deepinfer_kernels.swiglu import swiglu

Pair = tuple[torch.Tensor, torch.Tensor]
Case = Callable[[str, torch.dtype], Pair]
"""Makes inputs on a device in an activation dtype; returns what the operation gave and what it must give."""

_EPS = 1e-20
# Eight values whose mean square is 16, so that the root mean square of a row made of them is 4.
_NORMED = (7.0, 7.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def integers(generator: torch.Generator, limit: int, *shape: int) -> torch.Tensor:
    """fp32 integers from -limit to limit."""
    return torch.randint(-limit, limit + 1, shape, generator=generator).float()


def rounded(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 values that fp32 holds exactly, rounded once to ``dtype``.

    Raises:
        AssertionError: a value needs more than 24 bits, so that the case proves nothing.
    """
    single = exact.float()
    assert torch.equal(single.double(), exact), "a value of the case is not exact in fp32"
    return single.to(dtype)


def normed_rows(generator: torch.Generator, num_rows: int, width: int) -> torch.Tensor:
    """fp32 rows [num_rows, width] with a root mean square of exactly 4, signs and order random; width divides by 8."""
    base = torch.tensor(_NORMED).repeat(num_rows, width // len(_NORMED))
    order = torch.rand(num_rows, width, generator=generator).argsort(dim=1)
    signs = torch.randint(0, 2, (num_rows, width), generator=generator) * 2.0 - 1.0
    return base.gather(1, order) * signs


def _seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _rms_norm(device: str, dtype: torch.dtype) -> Pair:
    x = normed_rows(_seed(1), 5, 512)
    weight = 1 + integers(_seed(2), 63, 512) / 128
    want = rounded(x.double() / 4 * weight.double(), dtype)
    return rms_norm(x.to(device, dtype), weight.to(device, torch.bfloat16), _EPS), want


def _rope(device: str, dtype: torch.dtype) -> Pair:
    x, cos, sin = integers(_seed(3), 127, 5, 3, 64), integers(_seed(4), 8, 5, 16) / 8, integers(_seed(5), 8, 5, 16) / 8
    even, odd = x[..., 32::2].double(), x[..., 33::2].double()
    c, s = cos[:, None].double(), sin[:, None].double()
    turned = torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)
    want = rounded(torch.cat((x[..., :32].double(), turned), dim=-1), dtype)
    return rope(x.to(device, dtype), cos.to(device), sin.to(device)), want


def _collapse(device: str, dtype: torch.dtype) -> Pair:
    streams, pre = integers(_seed(6), 255, 5, 4, 300), integers(_seed(7), 64, 5, 4) / 64
    want = rounded((streams.double() * pre[:, :, None].double()).sum(1), dtype)
    return hc_collapse(streams.to(device, dtype), pre.to(device)), want


def _post(device: str, dtype: torch.dtype) -> Pair:
    y, streams = integers(_seed(8), 255, 5, 300), integers(_seed(9), 255, 5, 4, 300)
    post, comb = integers(_seed(10), 64, 5, 4) / 64, integers(_seed(11), 64, 5, 4, 4) / 64
    mixed = torch.einsum("tid,tij->tjd", streams.double(), comb.double())
    want = rounded(mixed + y[:, None].double() * post[:, :, None].double(), dtype)
    got = hc_post(y.to(device, dtype), streams.to(device, dtype), post.to(device), comb.to(device))
    return got, want


def _mix(device: str, dtype: torch.dtype) -> Pair:
    streams = normed_rows(_seed(12), 5, 640).view(5, 4, 160)
    fn = integers(_seed(13), (1 << 13) - 1, 24, 640) / 1024  # more bits than one bf16 has
    want = rounded(streams.flatten(1).double() @ fn.double().t() / 4, torch.float32)
    return hc_mix(streams.to(device, dtype), fn.to(device), _EPS), want


def _gate(device: str, dtype: torch.dtype) -> Pair:
    streams, value = normed_rows(_seed(14), 12, 512).view(3, 4, 512), integers(_seed(15), 255, 3, 512) / 64
    key = streams.clone()
    key[1] = -key[1]  # the score is +-256 * sqrt(512): the gate is 1, or far below the last bit
    weight = torch.full((4, 512), 16.0)
    is_open = torch.tensor([1.0, 0.0, 1.0]).double()[:, None, None]
    want = rounded(streams.double() + is_open * value[:, None].double(), dtype)
    streams, key, value = (tensor.to(device, dtype) for tensor in (streams, key, value))
    return engram_gate(streams, key, value, weight.to(device), weight.to(device), _EPS), want


def _compress(device: str, dtype: torch.dtype) -> Pair:
    latent = integers(_seed(16), 511, 6, 48)
    score = torch.full((6, 48), 3.0)  # equal scores weigh one half each
    state, block = torch.zeros(1, 8, 96), torch.zeros(1, dtype=torch.int32)
    exact = torch.zeros(6, 48, dtype=torch.float64)
    exact[1::2] = (latent[0::2].double() + latent[1::2].double()) / 2
    positions, req_idx = torch.arange(6), torch.zeros(6, dtype=torch.int32)
    arguments = (tensor.to(device) for tensor in (latent, score, positions, req_idx, state, block))
    return compress_pairs(*arguments, out_dtype=dtype), rounded(exact, dtype)


def _swiglu(device: str, dtype: torch.dtype) -> Pair:
    gate = 32 + integers(_seed(17), 31, 7, 300).abs()  # beyond 17, x * sigmoid(x) is x in fp32
    gate[:, ::3] = 0.0
    up, weight = integers(_seed(18), 255, 7, 300) / 16, integers(_seed(19), 8, 7) / 8
    want = rounded(gate.double() * up.double() * weight[:, None].double(), dtype)
    return swiglu(gate.to(device, dtype), up.to(device, dtype), 0.0, weight.to(device)), want


def _combine(device: str, dtype: torch.dtype) -> Pair:
    parts, shared = integers(_seed(20), 255, 5, 6, 300), integers(_seed(21), 255, 5, 300) / 4
    want = rounded(parts.double().sum(1) + shared.double(), dtype)
    return moe_combine(parts.to(device, dtype), shared.to(device, dtype)), want


def _linear(num_rows: int, depth: int) -> Case:
    def case(device: str, dtype: torch.dtype) -> Pair:
        x, weight = integers(_seed(22), 15, num_rows, depth), integers(_seed(23), 15, 96, depth) / 8
        want = rounded(x.double() @ weight.double().t(), dtype)
        return linear(x.to(device, dtype), weight.to(device, torch.bfloat16), out_dtype=dtype), want

    return case


def packed_weight(generator: torch.Generator, num_out: int, depth: int) -> Pair:
    """A small e4m3 weight [num_out, depth] of integers up to 15 and its scale bytes: 1/8, 1/4 or 1/2."""
    weight = integers(generator, 15, num_out, depth).to(torch.float8_e4m3fn)
    scale = torch.randint(124, 127, (num_out // 32, depth // 32), generator=generator, dtype=torch.uint8)
    return weight, scale


def _mxfp8(num_rows: int, depth: int) -> Case:
    def case(device: str, dtype: torch.dtype) -> Pair:
        x = integers(_seed(24), 255, num_rows, depth)  # more bits than e4m3 has: the quantiser rounds, ties included
        weight, scale = packed_weight(_seed(25), 96, depth)
        dense = dequantize_blocks(weight, scale, torch.float32).double()
        want = rounded(mxfp8_fake_quant_reference(x).double() @ dense.t(), dtype)
        weight, scale = weight.to(device), scale.to(device)
        return mxfp8_linear(x.to(device, dtype), weight, scale, out_dtype=dtype, quantize_input=True), want

    return case


def _grouped(device: str, dtype: torch.dtype) -> Pair:
    x = integers(_seed(26), 127, 5, 2, 256)  # not quantised: all bits count
    weight, scale = packed_weight(_seed(27), 128, 256)
    dense = dequantize_blocks(weight, scale, torch.float32).double().view(2, 64, 256)
    want = rounded(torch.einsum("tgk,gnk->tgn", x.double(), dense), dtype)
    return grouped_linear(x.to(device, dtype), weight.to(device), scale.to(device), out_dtype=dtype), want


# Those that Triton's interpreter runs as well: no inline assembly and no CUDA library on the way.
PLAIN: dict[str, Case] = {
    "rms_norm": _rms_norm,
    "rope": _rope,
    "hc_collapse": _collapse,
    "hc_post": _post,
    "hc_mix": _mix,
    "engram_gate": _gate,
    "compress_pairs": _compress,
    "moe_combine": _combine,
    "linear": _linear(5, 320),
    "linear, parts of K": _linear(5, 5120),
}
PACKED: dict[str, Case] = {
    "swiglu": _swiglu,
    "linear, many rows": _linear(1100, 2112),
    "mxfp8_linear": _mxfp8(5, 320),
    "mxfp8_linear, parts of K": _mxfp8(5, 2112),
    "mxfp8_linear, many rows": _mxfp8(1100, 2112),
    "grouped_linear": _grouped,
}
