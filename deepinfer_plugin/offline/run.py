"""Runs prompts through vLLM's offline engine and hands back each answer as soon as it is finished."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_plugin.answer_provenance import of_answer
from deepinfer_plugin.engine_errors import one_line, vllm_may_fail
from deepinfer_plugin.offline.inputs import Prompt
from deepinfer_plugin.sampling.extras import DRAFT_FACTS

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams

CPU_KV_CACHE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the prompts are answered; ``sampling`` holds for every line that does not set its own."""

    model: Path
    is_cpu: bool
    engine_flags: tuple[str, ...]
    sampling: Mapping[str, Any]
    with_token_ids: bool
    with_provenance: bool
    with_draft_facts: bool


def build_engine(plan: Plan) -> LLM:
    """Start vLLM on the checkpoint.

    Raises:
        EngineError: vLLM did not start; its own log says more.
    """
    from vllm import LLM, EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    flags = [
        f"--model={plan.model}",
        *([f"--kv-cache-memory-bytes={CPU_KV_CACHE_BYTES}", "--max-num-seqs=16"] if plan.is_cpu else []),
        *plan.engine_flags,
    ]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="offline … --"))
    arguments = EngineArgs.from_cli_args(parser.parse_args(flags))
    with vllm_may_fail("offline", "did not start"):
        return LLM.from_engine_args(arguments)


def answer(llm: LLM, plan: Plan, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, dict[str, Any]]]:
    """Yield each prompt with the JSON object of its answer, in the order in which answers finish.

    A prompt that vLLM refuses (one that is too long, say) gets an object with ``error``; the others go on.

    Raises:
        EngineError: vLLM stopped.
    """
    from vllm.exceptions import VLLMClientError

    waiting = list(reversed(prompts))
    running: dict[str, Prompt] = {}
    at_once = 2 * llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    while waiting or running:
        while waiting and len(running) < at_once:
            prompt = waiting.pop()
            try:
                running[_add(llm, plan, prompt)] = prompt
            except (ValueError, VLLMClientError) as error:
                yield prompt, {"id": prompt.name, "error": one_line(error)}
        with vllm_may_fail("offline", "stopped"):
            outputs = llm.llm_engine.step() if running else []
        for output in outputs:
            if output.finished:
                prompt = running.pop(output.request_id)
                yield prompt, _object(plan, prompt, output)


def _add(llm: LLM, plan: Plan, prompt: Prompt) -> str:
    """Hand one prompt to the engine; returns the id that its outputs carry: the engine's own has a random tail."""
    params = _sampling_params(plan, prompt)
    if prompt.text is not None:
        [name] = llm.enqueue([prompt.text], params, use_tqdm=False)
    else:
        [name] = llm.enqueue_chat([list(prompt.messages)], params, use_tqdm=False, **prompt.chat)
    return str(name).partition("-")[0]


def _sampling_params(plan: Plan, prompt: Prompt) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    values = {**plan.sampling, **prompt.sampling}
    if plan.with_draft_facts:
        values["extra_args"] = {DRAFT_FACTS: True}
    return SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **values)


def _object(plan: Plan, prompt: Prompt, output: RequestOutput) -> dict[str, Any]:
    [completion] = output.outputs
    seed = getattr(output, "seed", None)  # of our model only
    found: dict[str, Any] = {
        "id": prompt.name,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids or ()),
        "num_tokens": len(completion.token_ids),
        "seed": seed,
    }
    if plan.with_token_ids:
        found |= {"prompt_token_ids": list(output.prompt_token_ids or ()), "token_ids": list(completion.token_ids)}
    if plan.with_provenance:
        found["provenance"] = of_answer(seed)
    if plan.with_draft_facts:
        found[DRAFT_FACTS] = getattr(output, DRAFT_FACTS, None)
    return found
