"""Which seed a request is drawn with, and what is refused; the wrappers know the code that they wrap."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_plugin.errors import PlatformError
from deepinfer_plugin.sampling import front_end
from deepinfer_plugin.sampling.front_end import SEEDS_OF_RESPONSE, reported_seed, settle_seed
from deepinfer_plugin.wrapping import IS_OURS, wrap

pytestmark = pytest.mark.usefixtures("vllm_variables")

LARGEST = (1 << 64) - 1


def params(**values: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 1.0, **values})


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({"seed": 0}, 0),
        ({"seed": -2}, LARGEST - 1),
        ({"extra_args": {"seq_seed": 7}}, 7),
        ({"extra_args": {"seq_seed": "-1"}}, LARGEST),
        ({"extra_args": {"seq_seed": LARGEST - 1}}, LARGEST - 1),
        ({"extra_args": {"seq_seed": str(-(1 << 64) - 5)}}, LARGEST - 4),  # vLLM refuses longer numbers, text passes
        ({"extra_args": {"seq_seed": f" {1 << 70} "}}, 0),
        ({"seed": 9, "extra_args": {"seq_seed": str(9 + (1 << 64))}}, 9),
        ({"seed": -9, "extra_args": {"seq_seed": "-9"}}, LARGEST - 8),
        ({"seed": -1, "extra_args": {"seq_seed": 3}}, 3),  # vLLM takes -1 for no seed
        ({"seed": LARGEST - 2, "n": 3}, LARGEST - 2),
    ],
)
def test_a_given_seed_is_taken_modulo_2_to_the_64(values: dict[str, Any], want: int) -> None:
    settled = settle_seed(params(**values))
    assert settled.seed == want
    assert settled.extra_args is None


@pytest.mark.parametrize(
    ("values", "parameter"),
    [
        ({"extra_args": {"seq_seed": 1.0}}, "seq_seed"),
        ({"extra_args": {"seq_seed": True}}, "seq_seed"),
        ({"extra_args": {"seq_seed": None}}, "seq_seed"),
        ({"extra_args": {"seq_seed": [1]}}, "seq_seed"),
        ({"extra_args": {"seq_seed": "1e3"}}, "seq_seed"),
        ({"extra_args": {"seq_seed": "٣"}}, "seq_seed"),
        ({"extra_args": {"seq_seed": "-"}}, "seq_seed"),
        ({"extra_args": {"seq_seed": "9" * 5000}}, "seq_seed"),
        ({"seed": 1, "extra_args": {"seq_seed": 2}}, "seq_seed"),
        ({"seed": -2, "n": 3}, "seed"),
    ],
)
def test_what_is_no_seed_is_refused_with_its_name(values: dict[str, Any], parameter: str) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=rf"sampling: {parameter} is .*, expected ") as caught:
        settle_seed(params(**values))
    assert caught.value.parameter == parameter


def test_a_request_without_a_seed_gets_another_one_each_time() -> None:
    caller = params(extra_args={"seq_seed_": 1})
    seeds = {settle_seed(caller).seed for _ in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 1 << 53 for seed in seeds)
    assert caller.seed is None
    assert settle_seed(caller).extra_args == {"seq_seed_": 1}


def test_a_greedy_request_needs_no_seed_but_its_alias_is_still_checked() -> None:
    from vllm.exceptions import VLLMValidationError

    assert settle_seed(params(temperature=0.0)).seed is None
    assert settle_seed(params(temperature=0.0, extra_args={"seq_seed": str(1 << 70)})).extra_args is None
    with pytest.raises(VLLMValidationError, match="seq_seed"):
        settle_seed(params(temperature=0.0, extra_args={"seq_seed": "x"}))


def test_a_seed_survives_the_way_to_the_engine() -> None:
    import msgspec
    from vllm import SamplingParams

    for seed in (0, -2, LARGEST - 1):
        settled = settle_seed(params(extra_args={"seq_seed": seed}))
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(settled.clone()), type=SamplingParams)
        assert arrived.seed == seed % (1 << 64)
    minus_one = settle_seed(params(extra_args={"seq_seed": -1}))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(minus_one.clone()), type=SamplingParams).seed == LARGEST


@pytest.mark.parametrize(
    ("seed", "want"), [(None, None), (0, 0), (1 << 63, -(1 << 63)), (LARGEST - 1, -2), (LARGEST, LARGEST)]
)
def test_the_reported_seed_gives_the_same_draw_when_it_is_sent_back(seed: int | None, want: int | None) -> None:
    assert reported_seed(seed) == want
    if want is not None:
        assert settle_seed(params(extra_args={"seq_seed": want})).seed == seed


class Processor:
    """Stands in for vLLM's class."""

    model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="deepseek_v41"), get_vocab_size=lambda: 256)
    tokenizer = None

    def process_inputs(self, request_id: str, prompt: str, params: Any, *, priority: int = 0) -> Any:
        own = copy(params)
        return SimpleNamespace(
            request_id=request_id,
            prompt_token_ids=list(prompt.encode()),
            params=params,
            sampling_params=own,
            priority=priority,
        )


@pytest.fixture
def processor() -> type[Processor]:
    class Fresh(Processor):
        def process_inputs(self, request_id: str, prompt: str, params: Any, *, priority: int = 0) -> Any:
            return super().process_inputs(request_id, prompt, params, priority=priority)

    wrap(Fresh, "process_inputs", ("self", "request_id", "prompt", "params"), front_end._process_inputs)
    return Fresh


def test_the_engine_gets_a_copy_with_the_seed_and_the_answer_is_told(processor: type[Processor]) -> None:
    caller = params()
    noted: dict[str, int] = {}
    token = SEEDS_OF_RESPONSE.set(noted)
    try:
        first = processor().process_inputs("cmpl-1-0", "a", caller, priority=3)
        second = processor().process_inputs("cmpl-1-1", "b", params=caller)
        processor().process_inputs("cmpl-1-2", "c", params(temperature=0.0))
    finally:
        SEEDS_OF_RESPONSE.reset(token)
    assert noted == {"cmpl-1-0": first.params.seed, "cmpl-1-1": second.params.seed}
    assert first.params.seed != second.params.seed
    assert first.priority == 3
    assert caller.seed is None


def test_the_context_cap_shortens_the_engines_copy_only(processor: type[Processor]) -> None:
    caller = params(extra_args={"context_cap": 10}, max_tokens=16)
    request = processor().process_inputs("0", "abcdef", caller)
    assert (request.sampling_params.max_tokens, caller.max_tokens) == (4, 16)
    assert request.params.extra_args is None


def test_the_variables_of_the_server_reach_the_engine(
    processor: type[Processor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPINFER_SAMPLER_FORCE_TOPK", "8")
    monkeypatch.setenv("DEEPINFER_DECODE_TOKEN_BLACKLIST", "3-5,9")
    monkeypatch.setenv("DEEPINFER_COMPUTE_SUM_SMALLER_PROBS", "1")
    caller = params()
    arrived = processor().process_inputs("0", "a", caller).params
    assert arrived.extra_args == {
        "force_top_k": 8,
        "token_blacklist": [[3, 5], [9, 9]],
        "sum_smaller_probs": True,
    }
    assert (arrived.logprobs, caller.logprobs, caller.extra_args) == (0, None, None)


def test_another_model_is_left_alone(processor: type[Processor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Processor.model_config.hf_config, "model_type", "llama")
    caller = params(extra_args={"seq_seed": "not a seed"})
    assert processor().process_inputs("0", "a", caller).params is caller


def test_wrapping_twice_wraps_once(processor: type[Processor]) -> None:
    wrapped = processor.process_inputs
    wrap(processor, "process_inputs", ("self", "request_id", "prompt", "params"), front_end._process_inputs)
    assert processor.process_inputs is wrapped


@pytest.mark.parametrize(
    "owner",
    [
        type("Renamed", (), {"process_inputs": lambda self, request_id, inputs, params: None}),
        type("Gone", (), {}),
        type("Static", (), {"process_inputs": classmethod(lambda self, request_id, prompt, params: None)}),
    ],
)
def test_a_method_that_is_not_the_known_one_is_refused(owner: type) -> None:
    with pytest.raises(PlatformError, match=rf"wrapping: {owner.__name__}.process_inputs has the parameters"):
        wrap(owner, "process_inputs", ("self", "request_id", "prompt", "params"), front_end._process_inputs)


def test_a_parameter_that_would_be_lost_is_refused() -> None:
    owner = type("Wider", (), {"process_inputs": lambda self, request_id, prompt, params, priority: None})
    parameters = ("self", "request_id", "prompt", "params")
    with pytest.raises(PlatformError, match="and no other; install"):
        wrap(owner, "process_inputs", parameters, front_end._process_inputs, has_no_other=True)
    wrap(owner, "process_inputs", parameters, front_end._process_inputs)


def test_the_installed_vllm_has_the_known_methods() -> None:
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import RequestState

    kept = [
        (InputProcessor, "process_inputs", InputProcessor.__dict__["process_inputs"]),
        (RequestState, "from_new_request", RequestState.__dict__["from_new_request"]),
        (RequestState, "_new_request_output", RequestState.__dict__["_new_request_output"]),
    ]
    try:
        front_end.install()
        assert all(getattr(getattr(owner, name), IS_OURS) for owner, name, _ in kept)
    finally:
        for owner, name, original in kept:
            setattr(owner, name, original)
