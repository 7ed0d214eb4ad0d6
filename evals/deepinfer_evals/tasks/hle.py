"""Humanity's Last Exam, the questions without an image: the served model reads text only."""

from deepinfer_evals.benchmark import Benchmark, Parsed, Reference, Row


def _read(row: Row) -> Parsed | None:
    if row["image"]:
        return None
    return Parsed(id=str(row["id"]).strip(), question=str(row["question"]).strip(), gold=str(row["answer"]).strip())


HLE = Benchmark(
    name="hle",
    version=1,
    repo="cais/hle",
    config=None,
    split="test",
    is_gated=True,
    fields=("id", "question", "image", "answer", "answer_type"),
    num_questions=2158,
    grader="judge",
    read=_read,
    references=(
        Reference(label="checkpoint 1017, effort 100, HLE-Full", percent=42.6),
        Reference(label="first checkpoint, HLE-Full", percent=36.8),
    ),
    note="Text-only questions (2,158 of 2,500); the references are of all 2,500.",
)
