"""Judging by a model: the judge is pinned by name, prompt, sampling and seed, and no answer is ever judged twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_evals.benchmark import PROMPTS, Question, filled
from deepinfer_evals.canonical import hash_of, text_hash
from deepinfer_evals.endpoint import BusyError, DeniedError, Endpoint
from deepinfer_evals.graders.judge_reply import verdict_of_reply
from deepinfer_evals.graders.verdict import Outcome, Verdict, final_text
from deepinfer_evals.journal import Journal
from deepinfer_plugin.errors import EngineError, InputError, SettingError

TRIES = 5
FIRST_WAIT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSetting:
    """The pinned judge; its address is not part of it."""

    model: str
    seed: int = 0
    temperature: float = 0.0
    max_tokens: int = 4096

    def __post_init__(self) -> None:
        if not self.model:
            raise SettingError("judge: --judge-model is empty, expected the name of the model that judges")

    def to_json(self) -> dict[str, Any]:
        """What the manifest holds."""
        return {**self.body(), "model": self.model, "prompt": text_hash(template())}

    def body(self) -> dict[str, Any]:
        """Fields of the request."""
        return {"seed": self.seed, "temperature": self.temperature, "max_tokens": self.max_tokens}


def template() -> str:
    """The judge's prompt, as the file holds it."""
    return (PROMPTS / "judge.txt").read_text(encoding="utf-8")


async def reach(endpoint: Endpoint) -> None:
    """Find out before the first question whether the judge answers; whether it lists its models does not matter.

    Raises:
        BusyError: it cannot be reached.
        DeniedError: it wants another key.
    """
    async with endpoint:
        try:
            await endpoint.models()
        except (BusyError, DeniedError):
            raise
        except EngineError:
            return


class Judgements:
    """Replies of a judge by what it was asked; what was asked once is read from the journal from then on.

    Raises:
        InputError: a record of the journal cannot be read.
    """

    def __init__(self, setting: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> None:
        self._setting = dict(setting)
        try:
            self._replies = {str(record["key"]): str(record["reply"]) for record in records}
        except (KeyError, TypeError) as error:
            raise InputError(
                f"judge: a stored judgement is not whole ({error!r}), expected key and reply; restore judgements.jsonl"
            ) from None
        self._asking: dict[str, asyncio.Future[str]] = {}

    def verdict(self, question: Question, text: str) -> Verdict | None:
        """The verdict that is stored; None where this answer was not judged yet."""
        if not final_text(text).strip():
            return Verdict.of(Outcome.NO_ANSWER)  # there is nothing to judge
        reply = self._replies.get(self.key(question, text))
        return None if reply is None else verdict_of_reply(reply)

    async def judge(self, question: Question, text: str, endpoint: Endpoint, journal: Journal) -> Verdict:
        """The verdict, asked for if it is not stored; equal answers in flight at once are asked for once.

        Raises:
            EngineError: the judge refused, or did not answer after several tries.
        """
        known = self.verdict(question, text)
        if known is not None:
            return known
        key = self.key(question, text)
        if key not in self._asking:
            self._asking[key] = asyncio.ensure_future(self._ask(key, question, text, endpoint, journal))
        return verdict_of_reply(await asyncio.shield(self._asking[key]))

    def key(self, question: Question, text: str) -> str:
        """Hash of the judge and of everything it is shown."""
        return hash_of([self._setting, question.question, question.gold, final_text(text)])

    async def _ask(self, key: str, question: Question, text: str, endpoint: Endpoint, journal: Journal) -> str:
        slots = {"question": question.question, "gold": question.gold, "response": final_text(text)}
        body = {name: self._setting[name] for name in ("seed", "temperature", "max_tokens")}
        try:
            for attempt in range(TRIES):
                try:
                    reply = await endpoint.chat(filled(template(), slots), body)
                    break
                except BusyError:
                    if attempt == TRIES - 1:
                        raise
                    await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
        finally:
            self._asking.pop(key)
        journal.append({"key": key, "question": question.id, "reply": reply})
        self._replies[key] = reply
        return reply
