"""``vllm serve`` with a planted fault, for tests of ``certify``; no entry point and no flag of a server reaches it."""

from __future__ import annotations

import importlib
import sys

from deepinfer_plugin import envs
from deepinfer_plugin.platforms.detect import platform_class


def main(fault: str) -> None:
    """Run vLLM's command line on ``sys.argv`` inside a fault.

    The engine runs in this process, where the fault is: a child of its own would be started without it.

    Args:
        fault: import path ``module:function`` of a context manager without arguments.
    """
    platform_class()  # before torch, Triton and vLLM are imported
    envs.keep_engine_in_this_process()
    module, _, name = fault.partition(":")
    with getattr(importlib.import_module(module), name)():
        from vllm.entrypoints.cli.main import main as vllm_main

        sys.argv[0] = "vllm"
        vllm_main()
