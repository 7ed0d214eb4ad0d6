"""Rows of a benchmark: from the hub at one commit, or from a local copy. Nothing is shipped, nothing is guessed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deepinfer_evals.benchmark import Benchmark, Row
from deepinfer_evals.canonical import hash_of
from deepinfer_plugin.errors import InputError
from deepinfer_plugin.provenance_endpoint import file_hash

HUB = "https://huggingface.co/datasets"
SUFFIXES = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Rows and where they came from.

    Attributes:
        source: the name on the hub, or ``local``.
        revision: commit on the hub, or the hash over the local files.
        rows: only the benchmark's columns.
    """

    source: str
    revision: str
    rows: Sequence[Row]


def load(benchmark: Benchmark, *, revision: str | None, data_dir: Path | None) -> DataSet:
    """Load the rows.

    Args:
        benchmark: what to load.
        revision: commit or branch on the hub; None takes the newest commit of ``main``. The commit goes into the
            manifest, and a run that is continued keeps it.
        data_dir: a local copy: the hub is left alone.

    Raises:
        InputError: it cannot be had; the text says what to do.
    """
    if data_dir is not None:
        return _load_local(benchmark, data_dir)
    return _load_hub(benchmark, revision)


def _load_hub(benchmark: Benchmark, revision: str | None) -> DataSet:
    import datasets
    from huggingface_hub import HfApi

    datasets.disable_progress_bars()
    try:
        commit = revision
        if revision is None or _COMMIT.fullmatch(revision) is None:
            commit = HfApi().dataset_info(benchmark.repo, revision=revision).sha
        table = datasets.load_dataset(benchmark.repo, benchmark.config, split=benchmark.split, revision=commit)
    except Exception as error:  # the hub's client, httpx and datasets each have their own
        raise InputError(_advice(benchmark, error)) from None
    return DataSet(source=benchmark.repo, revision=str(commit), rows=_columns(benchmark, table))


def _advice(benchmark: Benchmark, error: Exception) -> str:
    """One sentence on what happened, and every step that leads to the rows."""
    what = " ".join(str(error).split())[:300]
    steps = [f"accept its terms at {HUB}/{benchmark.repo}", "log in with `hf auth login`"] if benchmark.is_gated else []
    kind = "gated" if benchmark.is_gated else "open"
    local = f"or point --data-dir to a folder with a copy ({', '.join(sorted(SUFFIXES))})"
    if "offline" in what.lower():
        steps = [*steps, "unset HF_HUB_OFFLINE, or name a commit that is in the cache with --revision"]
    else:
        steps = [*steps, "check that this machine reaches huggingface.co"]
    return (
        f"data set: {benchmark.repo} ({kind}) cannot be loaded ({type(error).__name__}: {what}), expected its rows; "
        f"{', then '.join(steps)}, {local}"
    )


def _load_local(benchmark: Benchmark, folder: Path) -> DataSet:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs of a broken file is in our message
    files = _files(benchmark, folder)
    kinds = sorted({SUFFIXES[path.suffix] for path in files})
    if len(kinds) > 1:
        raise InputError(
            f"data set: --data-dir {folder} holds {' and '.join(kinds)} files, expected one kind; "
            f"leave only the copy of {benchmark.repo} there"
        )
    names = [str(path) for path in files]
    with TemporaryDirectory(prefix="deepinfer-evals-") as cache:
        try:
            table = datasets.load_dataset(kinds[0], data_files=names, split="train", cache_dir=cache)
            rows = _columns(benchmark, table)
        except InputError:
            raise
        except Exception as error:
            what = " ".join(str(error.__cause__ or error).split())[:300]
            raise InputError(
                f"data set: --data-dir {folder} cannot be read ({what}), expected a copy of {benchmark.repo}; "
                "replace the file"
            ) from None
    return DataSet(source="local", revision=hash_of([file_hash(path) for path in files]), rows=rows)


def _files(benchmark: Benchmark, folder: Path) -> list[Path]:
    """Data files below the folder: those that name the configuration or the split, where any do, else all."""
    if not folder.is_dir():
        raise InputError(f"data set: --data-dir is {folder}, which is no folder, expected one with a copy of the rows")
    hidden = [
        path for path in folder.rglob("*") if any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    files = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path not in hidden)
    if not files:
        raise InputError(
            f"data set: --data-dir {folder} holds no {', '.join(sorted(SUFFIXES))} file, expected a copy of "
            f"{benchmark.repo}; download it from {HUB}/{benchmark.repo}"
        )
    for word in (benchmark.config, benchmark.split):
        named = [path for path in files if word and word in path.relative_to(folder).as_posix()]
        files = named or files
    return files


def _columns(benchmark: Benchmark, table: Any) -> list[dict[str, Any]]:
    missing = [name for name in benchmark.fields if name not in table.column_names]
    if missing:
        raise InputError(
            f"data set: column {missing[0]!r} of {benchmark.repo} is missing, expected {', '.join(benchmark.fields)}; "
            "name a copy of that data set"
        )
    return [_plain(row) for row in table.select_columns(list(benchmark.fields))]


def _plain(row: Row) -> dict[str, Any]:
    """Values as JSON has them; a number that a reader took for a float keeps the text of an integer."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in row.items()
    }
