"""One session of a run: inspect_ai asks what is missing, the journal keeps it, and its logs show it all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import inspect_ai
from inspect_ai import Task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver

from deepinfer_evals import model_api
from deepinfer_evals.benchmark import Benchmark, Question
from deepinfer_evals.endpoint import Answer, Endpoint
from deepinfer_evals.graders.verdict import Outcome, Verdict
from deepinfer_evals.grading import stored_verdict
from deepinfer_evals.journal import Journal
from deepinfer_evals.judge import Judgements
from deepinfer_evals.run_folder import Key, RunFolder
from deepinfer_evals.seeds import sample_seed
from deepinfer_evals.serving import Facts
from deepinfer_plugin.cli.console import WaitLine
from deepinfer_plugin.errors import EngineError

MAX_RETRIES = 8  # with growing waits of two minutes and more in all: a server may be restarting


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What one program run works on.

    Attributes:
        benchmark: what is asked.
        questions: those selected, in the order in which they are asked.
        epochs: how often each is asked.
        run_seed: seeds are derived from it.
        body: sampling parameters as fields of the request.
        facts: of the server.
        concurrency: requests in flight.
        folder: where results go.
        judgements, judge: stored replies and the judge's endpoint; None where the grader is a rule.
    """

    benchmark: Benchmark
    questions: Sequence[Question]
    epochs: int
    run_seed: int
    body: Mapping[str, Any]
    facts: Facts
    concurrency: int
    folder: RunFolder
    judgements: Judgements | None = None
    judge: Endpoint | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What a session left behind."""

    finished: int
    asked: int
    replayed: int
    errors: tuple[str, ...]


class _Work:
    """State that solver and scorer share: what is finished, and the journals that make it so."""

    def __init__(self, session: Session, answers: Journal, judgements: Journal) -> None:
        self.session = session
        self.by_id = {question.id: question for question in session.questions}
        self.answers = session.folder.answers()
        self.journal = answers
        self.judgement_journal = judgements
        self.asked = 0
        self.replayed = 0
        self._total = len(session.questions) * session.epochs
        self._line = WaitLine()
        self._begin_s = time.monotonic()

    def keep(self, key: Key, answer: Answer) -> None:
        """Put a new answer on the disk, once."""
        assert key not in self.answers, f"sample {key} was answered twice"
        self.journal.append({"question": key[0], "epoch": key[1], "answer": answer.to_json()})
        self.answers[key] = answer
        self.asked += 1
        self.show()

    def show(self) -> None:
        done, elapsed_s = self.asked + self.replayed, time.monotonic() - self._begin_s
        self._line.update(elapsed_s, f"  {done} of {self._total} answers, {self.replayed} of them stored before")

    def end(self) -> None:
        self._line.done()

    async def verdict(self, key: Key) -> Verdict:
        """The verdict of a finished answer; a judge is asked if it was not before."""
        session, question, answer = self.session, self.by_id[key[0]], self.answers[key]
        if session.judge is not None and session.judgements is not None and not answer.is_truncated:
            await session.judgements.judge(question, answer.text, session.judge, self.judgement_journal)
        return stored_verdict(session.benchmark.grader, question, answer, session.judgements)


def run_session(session: Session) -> Outcomes:
    """Ask everything of the session that is not in the folder yet.

    Interrupting it is safe at any moment: what is finished is on the disk.

    Raises:
        InputError: another process writes the folder, or the disk refused.
        KeyboardInterrupt: the user stopped it.
    """
    with Journal(session.folder.answers_path) as answers, Journal(session.folder.judgements_path) as judgements:
        work = _Work(session, answers, judgements)
        try:
            logs = inspect_ai.eval(
                _task(session, work),
                model=_model(session),
                epochs=session.epochs,
                log_dir=str(session.folder.logs_path),
                log_format="eval",
                log_realtime=False,
                log_model_api=False,
                display="none",
                score_display=False,
                fail_on_error=False,
                max_samples=session.concurrency,
                max_retries=MAX_RETRIES,
                metadata={"manifest": session.folder.manifest().content_hash},
                ctl_server=False,
            )
        finally:
            work.end()
    if not logs or logs[0].status == "cancelled":  # inspect_ai took the interrupt for itself
        raise KeyboardInterrupt
    samples = logs[0].samples or []
    errors = tuple(dict.fromkeys(sample.error.message for sample in samples if sample.error is not None))
    if logs[0].error is not None:
        errors = (*errors, logs[0].error.message)
    selected = {(question.id, epoch) for question in session.questions for epoch in range(1, session.epochs + 1)}
    return Outcomes(finished=len(selected & set(work.answers)), asked=work.asked, replayed=work.replayed, errors=errors)


def _task(session: Session, work: _Work) -> Task:
    samples = [
        Sample(id=question.id, input=question.prompt, target=question.gold, metadata={"row": question.row_hash})
        for question in session.questions
    ]
    return Task(
        dataset=MemoryDataset(samples, name=session.benchmark.name, location=session.benchmark.repo),
        solver=_recorded(work),
        scorer=_graded(work),
        name=session.benchmark.name,
        version=session.benchmark.version,
    )


def _model(session: Session) -> Any:
    target = session.facts.target
    known = {name: session.body.get(name) for name in ("temperature", "top_p", "max_tokens")}
    return get_model(
        f"{model_api.PROVIDER}/{target.model}",
        config=GenerateConfig(
            **known, extra_body=dict(session.body), max_connections=session.concurrency, adaptive_connections=False
        ),
        base_url=target.base_url,
        api_key=target.api_key or None,
        memoize=False,
        served_name=target.model,
        has_witness=session.facts.has_witness,
        slots=session.concurrency,
    )


@solver(name="recorded")
def _recorded(work: _Work) -> Solver:
    """Asks with the sample's own seed unless the journal holds the answer, and puts a new answer there."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        del generate
        session = work.session
        key = (str(state.sample_id), state.epoch)
        known = work.answers.get(key)
        if known is not None:
            work.replayed += 1
            work.show()
            state.output = model_api.output_of(known, str(state.model))
            return state
        seed = sample_seed(session.run_seed, session.benchmark.name, *key)
        model = get_model()
        state.output = await model.generate(state.messages, config=GenerateConfig(seed=seed, cache=False))
        assert isinstance(model.api, model_api.EndpointApi)
        answer = model.api.take(seed)
        if answer.seed != seed:
            raise EngineError(f"server: the answer was drawn with seed {answer.seed}, expected {seed}, which was sent")
        work.keep(key, answer)
        return state

    return solve


@scorer(metrics=[accuracy(), stderr()], name="graded")
def _graded(work: _Work) -> Scorer:
    """The verdict as inspect_ai has it, for its logs and its viewer."""

    async def score(state: TaskState, target: Target) -> Score:
        del target
        verdict = await work.verdict((str(state.sample_id), state.epoch))
        value = CORRECT if verdict.outcome is Outcome.CORRECT else INCORRECT
        return Score(
            value=value,
            answer=verdict.found,
            explanation=str(verdict.outcome),
            metadata={"if_whole": str(verdict.if_whole)},
        )

    return score


def log_files(folder: RunFolder) -> list[Path]:
    """inspect_ai's logs of a run, the oldest first."""
    return sorted(folder.logs_path.glob("*.eval"))
