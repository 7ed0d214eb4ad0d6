"""Search of the cut of a row between two keys, by one program: over a list that holds every entry between them.

A logit becomes an integer key that orders as it does. A cut keeps the keys from ``high`` on and the first few of those
from ``low`` to ``high``, which are equal or are all kept. The search counts entries (top-k) or adds their weights
(top-p) above three keys between the bounds at once, until what lies between the bounds fits the program's registers;
there it halves. Counts and weights are integers and exp is that of the reference, so any path gives its answer.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
import triton
import triton.language as tl

from deepinfer_kernels.restrict_logits.reference import WEIGHT_BITS
from deepinfer_kernels.triton_elementary import exp_nonpositive, ordered_key, value_of_key

_WEIGHT_STEPS = tl.constexpr(2.0**WEIGHT_BITS)
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
def limit_of(total, top_p):
    """int64: the weights before a kept entry sum to less than ``top_p`` of ``total``, that is to less than this."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def measure(list_ptr, length, largest, t1, t2, t3, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """Counts and summed weights (0 unless BY_WEIGHT) of the keys from ``t1``, ``t2`` and ``t3`` on, int64 each."""
    lane = tl.arange(0, BLOCK)
    packed = tl.zeros([BLOCK], dtype=tl.int32)  # three counts of 10 bits: a lane sees at most 2^20 / BLOCK entries
    w1 = tl.zeros([BLOCK], dtype=tl.int64)
    w2 = tl.zeros([BLOCK], dtype=tl.int64)
    w3 = tl.zeros([BLOCK], dtype=tl.int64)
    k1, k2, k3 = t1.to(tl.uint32), t2.to(tl.uint32), t3.to(tl.uint32)
    for start in range(0, length, BLOCK):
        v = start + lane
        logit = tl.load(list_ptr + v, mask=v < length, other=-float("inf"))
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
def _gather(list_ptr, held_ptr, length, low, high, BLOCK: tl.constexpr):
    """Copy the logits with keys from ``low`` to below ``high``, at most BLOCK of them; returns their number."""
    lane = tl.arange(0, BLOCK)
    num = tl.zeros([], dtype=tl.int32)
    for start in range(0, length, BLOCK):
        v = start + lane
        logit = tl.load(list_ptr + v, mask=v < length, other=-float("inf"))
        key = ordered_key(logit)
        is_held = (key >= low.to(tl.uint32)) & (key < high.to(tl.uint32))
        place = num + tl.cumsum(is_held.to(tl.int32), axis=0) - 1
        tl.store(held_ptr + place, logit, mask=is_held)
        num += tl.sum(is_held.to(tl.int32), axis=0)
    return num


@triton.jit
def search(
    list_ptr,
    held_ptr,
    length,
    largest,
    low,
    high,
    num_low,
    num_high,
    weight_low,
    weight_high,
    num_beside,
    weight_beside,
    goal,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Narrow the bounds between which the count (or weight) of the entries from a key on falls below ``goal``.

    The list holds the row's entries from ``low`` to ``high``; what it lacks or has elsewhere is ``num_beside`` and
    ``weight_beside``, to be added to what is measured in it. Returns low, high, and count and weight of the row's keys
    from each on: at low they reach ``goal``, at high they do not. Between them is one key, or one entry.
    """
    step = tl.zeros([], dtype=tl.int32)
    while (high - low > 1) & (num_low - num_high > BLOCK):
        t1, t2, t3 = _keys_between(low, high, step)
        n1, n2, n3, w1, w2, w3 = measure(list_ptr, length, largest, t1, t2, t3, BY_WEIGHT=BY_WEIGHT, BLOCK=BLOCK)
        n1, n2, n3 = n1 + num_beside, n2 + num_beside, n3 + num_beside
        w1, w2, w3 = w1 + weight_beside, w2 + weight_beside, w3 + weight_beside
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
        num_held = _gather(list_ptr, held_ptr, length, low, high, BLOCK=BLOCK)
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
