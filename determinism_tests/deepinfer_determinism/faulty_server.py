"""``vllm serve`` with a planted fault, for tests of ``certify``; no entry point and no flag of a server reaches it."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from typing import Any
from unittest import mock

from deepinfer_plugin.platforms.detect import platform_class


def main(fault: str) -> None:
    """Run vLLM's command line on ``sys.argv``; its engine process computes inside a fault.

    Args:
        fault: import path ``module:function`` of a context manager without arguments.
    """
    platform_class()  # before torch, Triton and vLLM are imported
    from vllm.entrypoints.cli.main import main as vllm_main
    from vllm.v1.engine.core import EngineCoreProc

    sys.argv[0] = "vllm"
    with mock.patch.object(EngineCoreProc, "run_engine_core", partial(_run_engine, fault)):
        vllm_main()


def _run_engine(fault: str, *args: Any, **kwargs: Any) -> None:
    """What the engine process runs in the place of vLLM's function; vLLM spawns it, so nothing is replaced in it."""
    from vllm.v1.engine.core import EngineCoreProc

    assert not isinstance(EngineCoreProc.run_engine_core, partial), "the engine process was forked, expected spawned"
    module, _, name = fault.partition(":")
    with getattr(importlib.import_module(module), name)():
        EngineCoreProc.run_engine_core(*args, **kwargs)
