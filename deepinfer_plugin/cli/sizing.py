"""``sizing``: which sizes a number of GPUs should run with, what fits, and how much of a load they carry."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_plugin.cli.console import say
from deepinfer_plugin.errors import SettingError

if TYPE_CHECKING:
    from deepinfer_plugin.model.config import ModelConfig

MAX_GPUS = 4096
WRONG = 1


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("sizing", help="sizes, memory and expected times for a number of GPUs; needs none")
    parser.add_argument("--gpus", type=int, default=8, help="how many (default 8)")
    parser.add_argument("--gpu", default="H200", metavar="KIND", help="H200 (default; measured), H100, H20, B200, B300")
    parser.add_argument("--memory-gib", type=float, default=None, help="of one GPU, where it is not the kind's")
    parser.add_argument(
        "--load",
        action="append",
        metavar="PROMPT:ANSWER[:RATE]",
        help="tokens of a request, and requests a second over all GPUs (default 4096:512:1); repeatable",
    )
    parser.add_argument("--step-tokens", type=int, default=8192, help="--max-num-batched-tokens (default 8192)")
    parser.add_argument("--utilization", type=float, default=0.92, help="--gpu-memory-utilization (default 0.92)")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of a step, 0 to 5 (default 0)")
    parser.add_argument("--acceptance", type=float, default=0.75, help="share of accepted drafts (default 0.75)")
    parser.add_argument("--text-only", action="store_true", help="without the image tower")
    parser.add_argument(
        "--config", type=Path, default=None, metavar="DIR", help="checkpoint (default: the released one)"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--check", action="store_true", help="compare with published and measured figures instead")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 0, or 1 where no layout serves the model.

    With --check: 1 where a figure is off by more than 25 % and the table has no word on it.
    """
    if arguments.check:
        return _check(arguments)
    if not 1 <= arguments.gpus <= MAX_GPUS:
        raise SettingError(f"sizing: --gpus is {arguments.gpus}, expected 1 to {MAX_GPUS}")
    from deepinfer_plugin.settings import Settings
    from deepinfer_plugin.sizing import report
    from deepinfer_plugin.sizing.devices import find_gpu
    from deepinfer_plugin.sizing.loads import Load, Mix
    from deepinfer_plugin.sizing.plan import Options, plan_all

    gpu = find_gpu(arguments.gpu, arguments.memory_gib)
    mix = Mix(loads=tuple(Load.parse(text) for text in arguments.load or ["4096:512:1"]))
    options = Options(
        step_tokens=arguments.step_tokens,
        utilization=arguments.utilization,
        num_drafts=arguments.drafts,
        acceptance=arguments.acceptance,
        replay=Settings.from_envs().replay,
        has_images=not arguments.text_only,
    )
    config = _config(arguments.config)
    plans = plan_all(config, gpu, arguments.gpus, mix, options)
    if arguments.json:
        say(json.dumps(report.to_json(config, gpu, mix, options, plans), indent=1))
    else:
        say(report.to_text(config, gpu, mix, options, plans))
    return 0 if any(plan.refusal is None for plan in plans) else WRONG


def _config(folder: Path | None) -> ModelConfig:
    from deepinfer_plugin.model.config import ModelConfig
    from deepinfer_plugin.reference.released_config import released_config_dict

    return ModelConfig.from_dict(released_config_dict()) if folder is None else ModelConfig.from_model_dir(folder)


def _check(arguments: argparse.Namespace) -> int:
    from deepinfer_plugin.sizing import published

    found = published.points()
    say(published.to_json(found) if arguments.json else published.to_text(found))
    return 0 if published.is_right(found) else WRONG
