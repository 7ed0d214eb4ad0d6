"""GPQA Diamond: 198 questions of four options each; their order hangs on the record's id."""

from deepinfer_evals.benchmark import Benchmark, Parsed, Reference, Row
from deepinfer_evals.seeds import keyed_order

LETTERS = "ABCD"
RIGHT = "Correct Answer"
WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def _read(row: Row) -> Parsed:
    record = str(row["Record ID"]).strip()
    order = keyed_order((RIGHT, *WRONG), record)
    options = [f"{letter}) {str(row[name]).strip()}" for letter, name in zip(LETTERS, order, strict=True)]
    return Parsed(
        id=record,
        question=str(row["Question"]).strip(),
        gold=LETTERS[order.index(RIGHT)],
        slots={"options": "\n".join(options)},
    )


GPQA_DIAMOND = Benchmark(
    name="gpqa_diamond",
    version=1,
    repo="Idavidrein/gpqa",
    config="gpqa_diamond",
    split="train",
    is_gated=True,
    fields=("Record ID", "Question", RIGHT, *WRONG),
    num_questions=198,
    grader="choice",
    read=_read,
    references=(
        Reference(label="checkpoint 1017, effort 100", percent=93.4),
        Reference(label="first checkpoint", percent=90.9),
    ),
)
