"""How engines of child processes share a machine: which GPUs each sees, and how its workers start.

Loads neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer_plugin.platforms.detect import current_decision, rank_places, visible_gpus
from deepinfer_plugin.settings import Accelerator
from deepinfer_plugin.variables import RANKS_PER_GPU

VISIBLE_SWITCH = "CUDA_VISIBLE_DEVICES"


def serving_gpus() -> tuple[str, ...]:
    """The GPUs of engines that children of this process start; empty where they run on the CPU."""
    decision = current_decision()
    return visible_gpus() if decision is not None and decision.accelerator is Accelerator.NVIDIA else ()


def lack_for(num_ranks: int) -> str:
    """What is missing for that many ranks, each on a device of its own; empty where nothing is, as on the CPU."""
    return lack_of_gpus(num_ranks, rank_places()) if serving_gpus() else ""


def lack_of_gpus(num_ranks: int, num_places: int) -> str:
    """What is missing for that many ranks on GPUs; empty where nothing is.

    Args:
        num_ranks: that are wanted.
        num_places: ``rank_places()``.
    """
    if num_places >= num_ranks:
        return ""
    return (
        f"{num_ranks} ranks need {num_ranks} GPUs, this process has places for {num_places}; "
        f"{RANKS_PER_GPU.name} lets several take turns on one"
    )


def worker_start(device: str) -> str:
    """How vLLM starts the workers of several ranks.

    On the CPU they share what the child has imported. CUDA cannot be used again behind a fork, and a child has used it
    once an engine of one rank has run in it.

    Args:
        device: ``cpu`` or ``cuda``.
    """
    return "fork" if device == "cpu" else "spawn"


def rotated(gpus: Sequence[str], number: int) -> dict[str, str]:
    """The variable with which child ``number`` begins at another GPU than its neighbours, and sees all of them.

    An engine of one rank takes the first. Nothing is to be set where there is no choice.
    """
    if len(gpus) < 2:
        return {}
    first = number % len(gpus)
    return {VISIBLE_SWITCH: ",".join([*gpus[first:], *gpus[:first]])}
