"""AIME 2026: thirty problems whose answers are integers from 0 to 999."""

from deepinfer_evals.benchmark import Benchmark, Parsed, Reference, Row


def _read(row: Row) -> Parsed:
    return Parsed(id=str(row["problem_idx"]), question=str(row["problem"]).strip(), gold=str(row["answer"]).strip())


AIME2026 = Benchmark(
    name="aime2026",
    version=1,
    repo="MathArena/aime_2026",
    config=None,
    split="train",
    is_gated=False,
    fields=("problem_idx", "problem", "answer"),
    num_questions=30,
    grader="integer",
    read=_read,
    references=(Reference(label="checkpoint 1017, effort 100", percent=99.9),),
)
