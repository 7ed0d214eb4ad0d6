"""The decode curve of a running server: ``vllm bench serve`` with one number of concurrent users after another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from deepinfer_plugin import envs
from deepinfer_plugin.bench.curves import DECODE, Point
from deepinfer_plugin.errors import EngineError

ROUNDS = 4  # requests of each user, so that most of the time all users are busy


def measure(
    base_url: str, model: Path, name: str, num_users: int, context: int, new_tokens: int, folder: Path
) -> Point:
    """Measure one point.

    Args:
        base_url: of the server, without ``/v1``.
        model: folder with the tokenizer.
        name: model name of the server.
        num_users: requests in flight.
        context: prompt tokens of a request.
        new_tokens: tokens that it generates.
        folder: for the tool's own result and log.

    Raises:
        EngineError: the tool failed, or a request of it did.
    """
    result, log = folder / f"served-{num_users}.json", folder / f"served-{num_users}.log"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *(f"--base-url={base_url}", f"--model={name}", f"--tokenizer={model}", "--dataset-name=random"),
        *(f"--random-input-len={context}", f"--random-output-len={new_tokens}", "--ignore-eos", "--temperature=0"),
        *(f"--num-prompts={ROUNDS * num_users}", f"--max-concurrency={num_users}", "--save-result"),
        *(f"--result-dir={folder}", f"--result-filename={result.name}"),
    ]
    with log.open("w", encoding="utf-8") as stream:
        code = subprocess.run(
            command, stdout=stream, stderr=subprocess.STDOUT, env=envs.child_environment(), check=False
        ).returncode
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
        failed = ROUNDS * num_users - int(found["completed"])
        step_time_s, tokens_per_s = float(found["mean_tpot_ms"]) / 1000.0, float(found["output_throughput"])
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(
            f"bench: vllm bench serve ended with code {code} and no result ({error}); see {log}"
        ) from None
    if failed:
        raise EngineError(f"bench: {failed} of {ROUNDS * num_users} requests failed, expected none; see {log}")
    return Point(kind=DECODE, batch=num_users, context=context, step_time_s=step_time_s, tokens_per_s=tokens_per_s)
