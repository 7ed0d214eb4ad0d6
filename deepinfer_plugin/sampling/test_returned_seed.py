"""The seed that comes back with an answer repeats it: through ``LLM`` in a child process, and through a real server."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin import envs
from deepinfer_plugin.cli.server import Server, free_port
from deepinfer_plugin.conftest import CheckpointFixture

TIMEOUT_S = 600
FLAGS = ("--max-model-len=256", "--max-num-seqs=8", "--kv-cache-memory-bytes=67108864")

# Prints, as JSON: [seed, tokens] of two equal prompts and another one without a seed; the same with their seeds; the
# base seed and tokens of n = 2; of a greedy request; and what the caller's parameters look like afterwards.
OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    llm = LLM(sys.argv[1], max_model_len=256, max_num_seqs=8, kv_cache_memory_bytes=1 << 26, disable_log_stats=True)
    prompts = [{"prompt_token_ids": ids} for ids in ([20, 21, 22], [20, 21, 22], [30, 31])]
    shared = SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True)

    def ask(prompts, params):
        found = llm.generate(prompts, params, use_tqdm=False)
        return [[output.seed, [list(part.token_ids) for part in output.outputs]] for output in found]

    first = ask(prompts, shared)
    again = ask(prompts, [SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True, seed=s) for s, _ in first])
    two = ask(prompts[:1], SamplingParams(temperature=2.0, max_tokens=12, ignore_eos=True, n=2, seed=first[0][0]))
    greedy = ask(prompts[:1], SamplingParams(temperature=0.0, max_tokens=2))
    print("RESULT " + json.dumps([first, again, two, greedy, shared.seed]))

if __name__ == "__main__":
    main()
"""


def test_offline_outputs_carry_the_seed_that_repeats_them(checkpoint: CheckpointFixture, tmp_path: Path) -> None:
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, str(script), str(checkpoint("nano", 0))],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=envs.child_environment({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}),
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith("RESULT "))
    first, again, two, greedy, left = json.loads(line.removeprefix("RESULT "))
    assert again == first
    seeds, answers = zip(*first, strict=True)
    assert len(set(seeds)) == 3
    assert answers[0] != answers[1], "the same prompt twice, two seeds"
    assert two[0][0] == seeds[0]
    assert two[0][1][0] == answers[0][0], "sample 0 of n is the answer to the seed itself"
    assert two[0][1][1] != answers[0][0]
    assert greedy[0][0] is None
    assert left is None, "the caller's parameters, which the prompts shared, were changed"


@pytest.fixture(scope="module")
def server(checkpoint: CheckpointFixture, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = [*FLAGS, "--served-model-name=m", "--reasoning-parser=deepseek_v41"]
    with Server(checkpoint("nano", 0), log, free_port(), flags) as running:
        running.wait_until_healthy(TIMEOUT_S)
        yield running


def post(server: Server, route: str, body: dict[str, Any]) -> tuple[int, str]:
    values = {"model": "m", "max_tokens": 10, "temperature": 1.0, **body}
    request = urllib.request.Request(
        f"{server.base_url}/v1/{route}", json.dumps(values).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ask(server: Server, route: str, body: dict[str, Any]) -> dict[str, Any]:
    status, text = post(server, route, body)
    assert status == 200, text
    found: dict[str, Any] = json.loads(text)
    return found


def texts(answer: dict[str, Any]) -> list[Any]:
    """What was generated, in any of the three forms."""
    return [choice.get("text") or choice["message"] for choice in answer.get("choices", ())] or answer["content"]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"prompt": "hello world", "temperature": 2.0}),
        ("chat/completions", {**CHAT, "temperature": 2.0, "n": 2}),
        ("completions", {"prompt": [[20, 21], [30, 31, 32]], "seed": 3}),
    ],
)
def test_an_answer_is_repeated_by_its_seed(server: Server, route: str, body: dict[str, Any]) -> None:
    first = ask(server, route, body)
    second = ask(server, route, {**body, "seed": first["seed"]})
    assert texts(second) == texts(first)
    assert second["seed"] == first["seed"] == body.get("seed", first["seed"])
    alias = {"vllm_xargs": {"seq_seed": str(first["seed"] - (1 << 64))}}
    third = ask(server, route, {**{k: v for k, v in body.items() if k != "seed"}, **alias})
    assert texts(third) == texts(first)


def test_each_prompt_of_a_request_without_seed_gets_its_own(server: Server) -> None:
    body = {"prompt": [[20, 21]] * 3, "temperature": 2.0, "return_token_ids": True}
    answer = ask(server, "completions", body)
    assert len(set(answer["seeds"])) == 3
    for seed, choice in zip(answer["seeds"], answer["choices"], strict=True):
        again = ask(server, "completions", {**body, "prompt": [20, 21], "seed": seed})
        assert again["choices"][0]["token_ids"] == choice["token_ids"]


def test_a_stream_begins_with_the_seed(server: Server) -> None:
    status, text = post(server, "chat/completions", {**CHAT, "stream": True})
    assert status == 200
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    seeds = [json.loads(event).get("seed") for event in events[:-1]]
    assert isinstance(seeds[0], int)
    assert set(seeds[1:]) == {None}


def test_other_routes_return_it_too_and_a_greedy_answer_has_none(server: Server) -> None:
    assert isinstance(ask(server, "messages", CHAT)["seed"], int)
    assert isinstance(ask(server, "responses", {"input": "hi", "max_output_tokens": 4})["seed"], int)
    assert "seed" not in ask(server, "completions", {"prompt": "hello", "temperature": 0})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"seed": 1, "vllm_xargs": {"seq_seed": 2}}, "seq_seed is 2 modulo 2^64, expected the value of seed, 1"),
        ({"vllm_xargs": {"seq_seed": 1.5}}, "seq_seed is 1.5, expected an integer, taken modulo 2^64"),
        ({"seed": -2, "n": 3}, "seed is 18446744073709551614 modulo 2^64 with n 3, expected seed + n at most 2^64"),
    ],
)
def test_a_bad_seed_is_answered_with_400(server: Server, body: dict[str, Any], text: str) -> None:
    status, answer = post(server, "completions", {"prompt": "hello", **body})
    assert status == 400
    assert text in json.loads(answer)["error"]["message"]
