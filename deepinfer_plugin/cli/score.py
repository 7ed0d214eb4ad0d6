"""``score``: token ids in, log-probabilities out, through the engine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deepinfer_plugin.cli.console import say
from deepinfer_plugin.cli.resumed import complete, manifest, prepare_engine
from deepinfer_plugin.errors import CheckpointError, SettingError
from deepinfer_plugin.scoring.inputs import Record, read_records
from deepinfer_plugin.scoring.store import ResultStore

EPILOG = """
Each line of FILE.jsonl is {"id": "a", "tokens": [0, 17, 4], "decode_from": 2}; decode_from is optional.
Row i of the output belongs to token i and speaks of the token after it. The output holds, per id:
  ID.tokens    [n] int64             ID.logprobs        [n, vocabulary] fp32
or with --top K:
  ID.top_ids   [n, K] int32          ID.top_logprobs    [n, K] fp32
                                     ID.token_logprobs  [n - 1] fp32, of token i + 1
With --raw-logits the arrays are called logits, top_logits and token_logits.
What follows -- goes to vLLM's engine, for example -- --tensor-parallel-size 2.
A run that was stopped goes on where it was when the same command is given again.
"""


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser(
        "score",
        help="log-probabilities of token sequences, through the engine",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="checkpoint folder")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl", help="sequences of token ids")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.safetensors", help="where the result goes")
    parser.add_argument("--top", type=int, default=None, metavar="K", help="the K most likely tokens only")
    parser.add_argument(
        "--decode-from", type=int, default=None, metavar="N", help="feed tokens from position N on one at a time"
    )
    parser.add_argument("--raw-logits", action="store_true", help="logits in place of log-probabilities")
    parser.add_argument("engine_flags", nargs="*", metavar="-- FLAGS", help="flags of vLLM's engine")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Score every record that is not stored yet, then write the output."""
    vocab_size = _vocab_size(arguments.model)
    if arguments.top is not None and not 1 <= arguments.top <= vocab_size:
        raise SettingError(f"score: --top is {arguments.top}, expected 1 to {vocab_size}, the vocabulary")
    records = read_records(arguments.input, vocab_size, arguments.decode_from)
    store = ResultStore(
        arguments.out,
        manifest(
            arguments,
            arguments.model,
            arguments.engine_flags,
            top=arguments.top,
            decode_from=arguments.decode_from,
            raw_logits=arguments.raw_logits,
        ),
    )
    code = complete(store, records, lambda missing: _score_missing(arguments, vocab_size, missing, store), "records")
    if code is not None:
        return code
    say(f"score: {len(records)} records, {sum(len(r.tokens) for r in records)} tokens -> {arguments.out}")
    return 0


def _score_missing(arguments: argparse.Namespace, vocab_size: int, missing: list[Record], store: ResultStore) -> None:
    is_cpu = prepare_engine("score")
    from tqdm import tqdm

    from deepinfer_plugin.scoring.engine import Plan, build_engine, score

    plan = Plan(
        model=arguments.model,
        vocab_size=vocab_size,
        top=arguments.top,
        raw_logits=arguments.raw_logits,
        is_cpu=is_cpu,
        engine_flags=tuple(arguments.engine_flags),
    )
    engine = build_engine(plan, missing)
    with tqdm(total=sum(len(record.tokens) for record in missing), unit="token", desc="score") as bar:
        for record, arrays in score(engine, plan, missing, bar.update):
            store.put(record.name, arrays)


def _vocab_size(model: Path) -> int:
    """Vocabulary of the checkpoint; vLLM reads and checks the rest of the config."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"score: {path} gives no vocab_size ({type(error).__name__}: {error}), expected that of a checkpoint; "
            "check --model"
        ) from None
