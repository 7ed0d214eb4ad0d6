"""Child process that compiles constraints with XGrammar, so that one which hangs or crashes takes nothing with it.

Lines on stdin: the tokenizer's description, then per constraint ``[kind, text]`` as JSON. Lines on stdout: ``"ready"``,
then per constraint ``null`` or what is wrong with it. Imports XGrammar only, not vLLM.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import xgrammar

KINDS = ("json", "regex", "grammar", "lark", "structural_tag")
_CACHE_BYTES = 64 << 20


def compile_text(compiler: Any, kind: str, text: str) -> Any:
    """Compile as vLLM's engine will, without its cache.

    Args:
        compiler: ``xgrammar.GrammarCompiler``.
        kind: one of ``KINDS``.
        text: schema, pattern, grammar or tag.

    Raises:
        Exception: whatever XGrammar raises.
    """
    if kind == "json":
        return compiler.compile_json_schema(text)
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "lark":
        return compiler.compile_lark(text)
    if kind == "grammar":
        return compiler.compile_grammar(text)
    tag = json.loads(text)
    if "structures" not in tag:
        return compiler.compile_structural_tag(text)
    items = [
        xgrammar.StructuralTagItem(begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"])
        for item in tag["structures"]
    ]
    return compiler.compile_structural_tag(items, tag["triggers"])


def main(memory_bytes: int) -> None:
    """Serve constraints until stdin ends, in at most ``memory_bytes`` of address space beside the libraries."""
    limit = _address_space_bytes() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    info = xgrammar.TokenizerInfo.deserialize_json(json.loads(sys.stdin.readline()))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=True, cache_limit_bytes=_CACHE_BYTES)
    bitmask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    _answer("ready")
    for line in sys.stdin:
        kind, text = json.loads(line)
        try:
            matcher = xgrammar.GrammarMatcher(compile_text(compiler, kind, text))
            matcher.fill_next_token_bitmask(bitmask)  # the first mask is part of the cost
            _answer(None)
        except Exception as error:  # whatever XGrammar raises is the answer to this constraint
            _answer(f"{type(error).__name__}: {error}")


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _answer(value: str | None) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
