"""``offline``: a file of prompts in, a JSONL file of answers out; goes on where it was stopped."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_plugin.cli.console import say
from deepinfer_plugin.cli.model_folder import add_model, add_sizes, model_folder, size_flags
from deepinfer_plugin.cli.resumed import complete, manifest, prepare_engine
from deepinfer_plugin.errors import SettingError
from deepinfer_plugin.offline.inputs import Prompt, check_sampling, read_prompts
from deepinfer_plugin.offline.store import AnswerStore

if TYPE_CHECKING:
    from deepinfer_plugin.offline.run import Plan

SOME_REFUSED = 1


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("offline", help="answer a file of prompts; goes on where it was stopped")
    add_model(parser)
    parser.add_argument(
        "--input", type=Path, required=True, metavar="FILE", help="*.jsonl: objects; otherwise one prompt a line"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="answers, in the input's order")
    parser.add_argument("--raw", action="store_true", help="a prompt is raw text (default: the message of a user)")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer (default 512)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy (default 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(default 1)")
    parser.add_argument("--top-k", type=int, default=-1, help="-1: all (default)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draws; noise also depends on the prompt (default 0)"
    )
    parser.add_argument("--token-ids", action="store_true", help="also write the ids of prompt and answer")
    parser.add_argument("--provenance", action="store_true", help="also write what each answer depends on")
    parser.add_argument("--draft-facts", action="store_true", help="also write what became of the drafts of each step")
    add_sizes(parser)
    parser.add_argument("engine_flags", nargs="*", metavar="-- FLAGS", help="flags for vLLM")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer what is missing and join the results; 0, or 1 where vLLM refused some prompts."""
    model = model_folder("offline", arguments.model)
    sampling = {key: getattr(arguments, key) for key in ("max_tokens", "temperature", "top_p", "top_k", "seed")}
    try:
        check_sampling(sampling)
    except ValueError as error:
        raise SettingError(f"offline: --{error}") from None
    flags = (*size_flags("offline", arguments), *arguments.engine_flags)
    prompts = read_prompts(arguments.input, is_chat=not arguments.raw)
    store = AnswerStore(
        arguments.out,
        manifest(
            arguments,
            model,
            flags,
            raw=arguments.raw,
            sampling=sampling,
            token_ids=arguments.token_ids,
            provenance=arguments.provenance,
            draft_facts=arguments.draft_facts,
        ),
    )
    refused: list[str] = []

    def answer_missing(missing: list[Prompt]) -> None:
        is_cpu = prepare_engine("offline")
        from deepinfer_plugin.offline.run import Plan

        plan = Plan(
            model=model,
            is_cpu=is_cpu,
            engine_flags=flags,
            sampling=sampling,
            with_token_ids=arguments.token_ids,
            with_provenance=arguments.provenance,
            with_draft_facts=arguments.draft_facts,
        )
        refused.extend(_answer(plan, missing, store, len(prompts)))

    code = complete(store, prompts, answer_missing, "answers")
    if code is not None:
        return code
    say(f"offline: {len(prompts)} answers -> {arguments.out}")
    if refused:
        say(f"offline: {len(refused)} of them are errors: vLLM refused the prompt, see their field error")
    return SOME_REFUSED if refused else 0


def _answer(plan: Plan, missing: list[Prompt], store: AnswerStore, total: int) -> Iterator[str]:
    """Store an answer for each missing prompt; names of those that vLLM refused."""
    from tqdm import tqdm

    from deepinfer_plugin.offline.run import answer, build_engine

    llm = build_engine(plan)
    with tqdm(total=total, initial=total - len(missing), unit="answer", desc="offline") as bar:
        for prompt, found in answer(llm, plan, missing):
            store.put(prompt.name, found)
            bar.update()
            if "error" in found:
                yield prompt.name
