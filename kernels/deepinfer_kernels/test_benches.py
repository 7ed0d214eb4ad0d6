"""The benches without a GPU: their cases run at small sizes, and their counts are what the tensors hold."""

import json
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deepinfer_kernels import bench_all
from deepinfer_kernels.bench import Case, Ceilings, Record, report
from deepinfer_kernels.bench_all import bench_ops, cases_of, main
from deepinfer_kernels.bench_plot import roofline
from deepinfer_kernels.bench_sizes import REAL, TINY

_PACKAGE = Path(__file__).parent
_OPS = sorted(path.parent.name for path in _PACKAGE.glob("*/reference.py"))
_CEILINGS = Ceilings(device="card", copy_bytes_per_s=4e12, matmul_flops_per_s=8e14)


def _num_bytes(values: Iterable[object]) -> int:
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            total += value.nbytes
        elif isinstance(value, tuple | list):
            total += _num_bytes(value)
    return total


def _made(case: Case) -> partial[object]:
    call = case.make("cpu")
    assert isinstance(call, partial)
    return call


def test_every_operation_has_a_bench() -> None:
    assert sorted(bench_ops()) == _OPS


@pytest.mark.parametrize("op", _OPS)
def test_the_cases_run_and_their_bytes_are_those_of_inputs_and_results(op: str) -> None:
    for case in cases_of(op, TINY):
        call = _made(case)
        result = call()
        held = _num_bytes([*call.args, *call.keywords.values(), result])
        if case.is_gather:
            assert case.num_bytes <= held, case.name
        else:
            assert case.num_bytes == held, case.name


@pytest.mark.parametrize("op", ["linear", "moe_gate", "hc_mix"])
def test_operations_of_products_are_those_that_torch_counts(op: str) -> None:
    num_checked = 0
    for case in cases_of(op, TINY):
        num_rows = int(case.name.split()[-2])
        if num_rows % 16 == 0:  # the references fill their row tiles
            with FlopCounterMode(display=False) as counter:
                _made(case)()
            squares = 2 * num_rows * TINY.num_streams * TINY.hidden_size if op == "hc_mix" else 0
            assert case.flops == counter.get_total_flops() + squares, case.name
            num_checked += 1
    assert num_checked > 0


@pytest.mark.parametrize("op", _OPS)
def test_real_cases_are_listed_without_allocating_and_have_names_of_their_own(op: str) -> None:
    cases = cases_of(op, REAL)
    assert len({case.name for case in cases}) == len(cases) > 0
    assert all(case.num_bytes > 0 and case.flops > 0 for case in cases)


def test_known_sizes_of_the_model() -> None:
    by_name = {case.name: case for op in ("linear", "sparse_attention", "moe_experts") for case in cases_of(op, REAL)}
    wq_b = by_name["wq_b [32768 x 1280] 64 rows"]
    assert wq_b.num_bytes == 32768 * 1280 + 32768 * 1280 // 1024 + 2 * 64 * (1280 + 32768)
    attention = by_name["decode 64 rows"]
    assert attention.flops == 64 * 84_000_000 - 64 * 113_920  # 84 MFLOP a row: 2 products x 64 x 512 x 640
    assert by_name["384 experts 4096 tokens"].num_bytes > 384 * 3 * 5120 * 2304 * 17 // 32


def _record(op: str, flops: int) -> Record:
    return Record(
        op=op, case="a < b", time_us=10.0, spread_us=0.1, bytes=1000, flops=flops, copy_ratio=0.5, matmul_ratio=0.1
    )


def test_the_roofline_has_a_point_for_every_case_with_operations() -> None:
    chart = roofline([_record("rope", 50), _record("linear", 10**6), _record("none", 0)], _CEILINGS)
    assert chart.count("<circle") == 2
    assert "a &lt; b" in chart
    assert ">none<" not in chart


def test_a_report_is_json_and_says_what_was_not_run() -> None:
    content = json.loads(json.dumps(report(_CEILINGS, [_record("rope", 1)], not_run=[{"op": "x"}])))
    assert content["records"][0]["op"] == "rope"
    assert content["not_run"] == [{"op": "x"}]


def _case(name: str) -> Case:
    return Case(op="rope", name=name, num_bytes=1000, flops=10, make=lambda device: partial(int))


def test_a_case_beyond_the_share_and_one_that_fails_are_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def measured(case: Case, ceilings: Ceilings) -> Record:
        if case.name == "broken":
            raise RuntimeError("no kernel")
        return _record(case.op, 50)

    monkeypatch.setattr(bench_all, "measure", measured)
    run = bench_all.Run(_CEILINGS, tmp_path, 100.0)  # looks at the clock, and every further look costs 10 s
    run.measure_op([_case("first"), _case("broken"), _case("second"), _case("late"), _case("later")], 25)
    run.write()
    content = json.loads((tmp_path / "kernels.json").read_text())
    # Five of 25 cases may take twice a fifth of the 90 s that are left: 36 s, or three looks.
    used_up = "the operation's time was used up"
    assert [record["op"] for record in content["records"]] == ["rope", "rope"]
    assert content["not_run"] == [
        {"op": "rope", "case": "broken", "why": "RuntimeError: no kernel"},
        {"op": "rope", "case": "late", "why": used_up},
        {"op": "rope", "case": "later", "why": used_up},
    ]
    assert run.num_failed == 1
    assert (tmp_path / "roofline.svg").read_text(encoding="utf-8").count("<circle") == 2


def test_an_unknown_operation_and_a_missing_gpu_are_errors_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as unknown:
        main(["--out", str(tmp_path), "--only", "rope,softmax"])
    assert unknown.value.code == 2
    assert "--only is 'softmax'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit) as missing:
            main(["--out", str(tmp_path)])
        assert missing.value.code == 2
        assert "no NVIDIA GPU" in capsys.readouterr().err
