"""The restriction as one Triton kernel: a program searches the cut of its row between two logits.

A logit becomes an integer key that orders as it does. A cut keeps the keys from ``high`` on and the first few of those
from ``low`` to ``high``, which are equal or are all kept. The search counts entries (top-k) or adds their weights
(top-p) above three keys between the bounds at once, until what lies between the bounds fits the program's registers;
there it halves. Counts and weights are integers and exp is that of the reference, so any path gives its answer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import torch
import triton
import triton.language as tl

from deepinfer_kernels import tiling
from deepinfer_kernels.launching import last_axis_contiguous
from deepinfer_kernels.restrict_logits.reference import WEIGHT_BITS
from deepinfer_kernels.triton_elementary import exp_nonpositive, ordered_key, value_of_key

_WEIGHT_STEPS = tl.constexpr(2.0**WEIGHT_BITS)
_AT_ONCE = 1  # blocks whose loads are in flight together
_VALUE_STEPS = tl.constexpr(4)  # searches between logits by their values; then between keys, which ends in 16 at most


@triton.jit
def ratio_to_largest(logit, largest):
    """exp(logit - largest), 1 where they are equal: fp32."""
    return tl.where(logit == largest, 1.0, exp_nonpositive(logit - largest))


@triton.jit
def weight_of(logit, largest):
    """int64 weight of a logit that is not NaN."""
    return (ratio_to_largest(logit, largest) * _WEIGHT_STEPS).to(tl.int64)


@triton.jit
def extent_of_row(row_ptr, vocab_size, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """Largest and least logit above -inf (both -inf where there is none), and how many there are."""
    lane = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    lowest = tl.full([BLOCK], float("inf"), dtype=tl.float32)
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK * AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            v = start + step * BLOCK + lane
            logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
            is_number = logit > -float("inf")  # not NaN either
            highest = tl.where(logit > highest, logit, highest)
            lowest = tl.where(is_number & (logit < lowest), logit, lowest)
            counts += is_number.to(tl.int32)
    num = tl.sum(counts, axis=0).to(tl.int64)
    return tl.max(highest, axis=0), tl.where(num > 0, tl.min(lowest, axis=0), -float("inf")), num


@triton.jit
def _num_reaching(row_ptr, vocab_size, largest, min_p, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """How many entries have at least ``min_p`` times the largest probability."""
    lane = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK * AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            v = start + step * BLOCK + lane
            logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
            reaches = (logit > -float("inf")) & (ratio_to_largest(logit, largest) >= min_p)
            counts += reaches.to(tl.int32)
    return tl.sum(counts, axis=0).to(tl.int64)


@triton.jit
def _measure(
    row_ptr, vocab_size, largest, t1, t2, t3, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Counts and summed weights (0 unless BY_WEIGHT) of the keys from ``t1``, ``t2`` and ``t3`` on, int64 each."""
    lane = tl.arange(0, BLOCK)
    packed = tl.zeros([BLOCK], dtype=tl.int32)  # three counts of 10 bits: a lane sees at most 2^20 / BLOCK entries
    w1 = tl.zeros([BLOCK], dtype=tl.int64)
    w2 = tl.zeros([BLOCK], dtype=tl.int64)
    w3 = tl.zeros([BLOCK], dtype=tl.int64)
    k1, k2, k3 = t1.to(tl.uint32), t2.to(tl.uint32), t3.to(tl.uint32)
    for start in range(0, vocab_size, BLOCK * AT_ONCE):
        for step in tl.static_range(AT_ONCE):
            v = start + step * BLOCK + lane
            logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
            key = ordered_key(logit)
            packed += (key >= k1).to(tl.int32) + (tl.where(key >= k2, 1024, 0) + tl.where(key >= k3, 1048576, 0))
            if BY_WEIGHT:
                weight = weight_of(logit, largest)
                w1 += tl.where(key >= k1, weight, 0)
                w2 += tl.where(key >= k2, weight, 0)
                w3 += tl.where(key >= k3, weight, 0)
    n1 = tl.sum(packed & 1023, axis=0).to(tl.int64)
    n2 = tl.sum((packed >> 10) & 1023, axis=0).to(tl.int64)
    n3 = tl.sum(packed >> 20, axis=0).to(tl.int64)
    return n1, n2, n3, tl.sum(w1, axis=0), tl.sum(w2, axis=0), tl.sum(w3, axis=0)


@triton.jit
def _keys_between(low, high, step):
    """Three keys from ``low`` up to below ``high``: a quarter each of the way between their logits, or between them."""
    first = value_of_key(low.to(tl.uint32))
    span = value_of_key((high - 1).to(tl.uint32)) - first
    t1 = ordered_key(first + span * 0.25).to(tl.int64)
    t2 = ordered_key(first + span * 0.5).to(tl.int64)
    t3 = ordered_key(first + span * 0.75).to(tl.int64)
    is_inside = (step < _VALUE_STEPS) & (low < t1) & (t1 < t2) & (t2 < t3) & (t3 < high)
    quarter = (high - low) // 4
    half = (high - low) // 2
    rest = (high - low) * 3 // 4
    return (
        tl.where(is_inside, t1, low + quarter),
        tl.where(is_inside, t2, low + half),
        tl.where(is_inside, t3, low + rest),
    )


@triton.jit
def _gather(row_ptr, held_ptr, vocab_size, low, high, BLOCK: tl.constexpr):
    """Copy the logits with keys from ``low`` to below ``high``, at most BLOCK of them; returns their number."""
    lane = tl.arange(0, BLOCK)
    num = tl.zeros([], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        v = start + lane
        logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
        key = ordered_key(logit)
        is_held = (key >= low.to(tl.uint32)) & (key < high.to(tl.uint32))
        place = num + tl.cumsum(is_held.to(tl.int32), axis=0) - 1
        tl.store(held_ptr + place, logit, mask=is_held)
        num += tl.sum(is_held.to(tl.int32), axis=0)
    return num


@triton.jit
def _search(
    row_ptr,
    held_ptr,
    vocab_size,
    largest,
    least,
    num_low,
    weight_low,
    goal,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Bounds between which the count (or weight) of the entries from a key on falls below ``goal``, from ``least`` on.

    Returns low, high, and count and weight of the keys from each on: at low they reach ``goal``, at high they do not.
    Between them is one key, or one entry.
    """
    low = ordered_key(least).to(tl.int64)
    high = ordered_key(largest).to(tl.int64) + 1
    num_high = tl.zeros([], dtype=tl.int64)
    weight_high = tl.zeros([], dtype=tl.int64)
    step = tl.zeros([], dtype=tl.int32)
    while (high - low > 1) & (num_low - num_high > BLOCK):
        t1, t2, t3 = _keys_between(low, high, step)
        n1, n2, n3, w1, w2, w3 = _measure(
            row_ptr, vocab_size, largest, t1, t2, t3, BY_WEIGHT=BY_WEIGHT, BLOCK=BLOCK, AT_ONCE=AT_ONCE
        )
        in1, in2, in3 = n1 >= goal, n2 >= goal, n3 >= goal
        if BY_WEIGHT:
            in1, in2, in3 = w1 >= goal, w2 >= goal, w3 >= goal
        high = tl.where(in3, high, tl.where(in2, t3, tl.where(in1, t2, t1)))
        num_high = tl.where(in3, num_high, tl.where(in2, n3, tl.where(in1, n2, n1)))
        weight_high = tl.where(in3, weight_high, tl.where(in2, w3, tl.where(in1, w2, w1)))
        low = tl.where(in3, t3, tl.where(in2, t2, tl.where(in1, t1, low)))
        num_low = tl.where(in3, n3, tl.where(in2, n2, tl.where(in1, n1, num_low)))
        weight_low = tl.where(in3, w3, tl.where(in2, w2, tl.where(in1, w1, weight_low)))
        step += 1
    if (high - low > 1) & (num_low - num_high > 1):
        tl.debug_barrier()  # an earlier search may still read what it held
        num_held = _gather(row_ptr, held_ptr, vocab_size, low, high, BLOCK=BLOCK)
        tl.debug_barrier()
        lane = tl.arange(0, BLOCK)
        logit = tl.load(held_ptr + lane, mask=lane < num_held, other=-float("inf"))
        key = ordered_key(logit)
        weight = weight_of(logit, largest)
        num_above, weight_above = num_high, weight_high
        while (high - low > 1) & (num_low - num_high > 1):
            middle = low + (high - low) // 2
            is_above = key >= middle.to(tl.uint32)
            num = num_above + tl.sum(is_above.to(tl.int32), axis=0).to(tl.int64)
            total = weight_above
            reaches = num >= goal
            if BY_WEIGHT:
                total += tl.sum(tl.where(is_above, weight, 0), axis=0)
                reaches = total >= goal
            low = tl.where(reaches, middle, low)
            num_low = tl.where(reaches, num, num_low)
            weight_low = tl.where(reaches, total, weight_low)
            high = tl.where(reaches, high, middle)
            num_high = tl.where(reaches, num_high, num)
            weight_high = tl.where(reaches, weight_high, total)
    return low, high, num_low, num_high, weight_low, weight_high


@triton.jit
def _cut_of_row(row_ptr, held_ptr, vocab_size, top_k, top_p, min_p, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """The cut of a restricted row: low, high, entries between them, and how many of these stay, lowest ids first."""
    largest, least, num = extent_of_row(row_ptr, vocab_size, BLOCK, AT_ONCE)
    low = ordered_key(least).to(tl.int64)
    high = low
    num_between = tl.zeros([], dtype=tl.int64)
    num_kept = tl.zeros([], dtype=tl.int64)
    if num > 0:
        count = num
        if min_p > 0.0:
            count = tl.minimum(count, _num_reaching(row_ptr, vocab_size, largest, min_p, BLOCK, AT_ONCE))
        if (top_k > 0) & (top_k < vocab_size):
            count = tl.minimum(count, top_k)
        count = tl.maximum(count, 1)
        none = tl.zeros([], dtype=tl.int64)
        if count < num:
            low, high, num_low, num_high, _, _ = _search(
                row_ptr,
                held_ptr,
                vocab_size,
                largest,
                least,
                num,
                none,
                count,
                BY_WEIGHT=False,
                BLOCK=BLOCK,
                AT_ONCE=AT_ONCE,
            )
            num_between = num_low - num_high
            num_kept = count - num_high
        if top_p < 1.0:
            n_low, _, _, w_low, w_high, _ = _measure(
                row_ptr, vocab_size, largest, low, high, high, BY_WEIGHT=True, BLOCK=BLOCK, AT_ONCE=AT_ONCE
            )
            # Between the bounds all weights are equal, or all entries stay.
            equal = weight_of(value_of_key(low.to(tl.uint32)), largest)
            total = tl.where(num_kept == num_between, w_low, w_high + num_kept * equal)
            limit = tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)  # before < p * total, in integers
            limit = tl.maximum(limit, 1)
            low, high, num_low, num_high, _, weight_high = _search(
                row_ptr,
                held_ptr,
                vocab_size,
                largest,
                value_of_key(low.to(tl.uint32)),
                n_low,
                w_low,
                limit,
                BY_WEIGHT=True,
                BLOCK=BLOCK,
                AT_ONCE=AT_ONCE,
            )
            num_between = num_low - num_high
            equal = tl.maximum(weight_of(value_of_key(low.to(tl.uint32)), largest), 1)
            missing = limit - weight_high
            num_kept = tl.where(num_between == 1, 1, (missing + equal - 1) // equal)
    return low, high, num_between, num_kept


@triton.jit(do_not_specialize=["vocab_size"])
def _restrict_kernel(
    logits_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    held_ptr,
    out_ptr,
    vocab_size,
    stride_t,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_t
    out_row_ptr = out_ptr + row * vocab_size
    lane = tl.arange(0, BLOCK)
    top_k = tl.load(top_k_ptr + row).to(tl.int64)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0):
        low, high, num_between, num_kept = _cut_of_row(
            row_ptr, held_ptr + row * BLOCK, vocab_size, top_k, top_p, min_p, BLOCK, AT_ONCE
        )
        low_key, high_key = low.to(tl.uint32), high.to(tl.uint32)
        keeps_first = (num_kept < num_between) & (num_kept > 0)
        if num_kept == num_between:
            high_key = low_key
        num_before = tl.zeros([], dtype=tl.int64)
        for start in range(0, vocab_size, BLOCK):
            v = start + lane
            logit = tl.load(row_ptr + v, mask=v < vocab_size, other=-float("inf"))
            key = ordered_key(logit)
            is_kept = (key >= high_key) & (key > 0)
            if keeps_first:
                is_between = ((key >= low_key) & (key < high_key)).to(tl.int32)
                is_kept = is_kept | ((is_between > 0) & (num_before + tl.cumsum(is_between, axis=0) <= num_kept))
                num_before += tl.sum(is_between, axis=0)
            tl.store(out_row_ptr + v, tl.where(is_kept, logit, -float("inf")), mask=v < vocab_size)
    else:
        for start in range(0, vocab_size, BLOCK):
            v = start + lane
            logit = tl.load(row_ptr + v, mask=v < vocab_size, other=0.0)
            tl.store(out_row_ptr + v, logit, mask=v < vocab_size)


def restrict_logits_triton(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Launch the kernel on arguments ``restrict_logits`` has checked."""
    num_rows, vocab_size = logits.shape
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if out.numel() > 0:
        logits = last_axis_contiguous(logits)
        block = min(tiling.RESTRICT_BLOCK, max(32, triton.next_power_of_2(vocab_size)))
        held = torch.empty((num_rows, block), dtype=torch.float32, device=logits.device)
        _restrict_kernel[(num_rows,)](
            logits,
            top_k.contiguous(),
            top_p.contiguous(),
            min_p.contiguous(),
            held,
            out,
            vocab_size,
            logits.stride(0),
            BLOCK=block,
            AT_ONCE=_AT_ONCE,
            num_warps=max(1, block // 256),
            enable_fp_fusion=False,
        )
    return out
