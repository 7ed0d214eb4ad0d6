"""The gate before vLLM's structured output: each new constraint is compiled in a child process first, with a limit.

vLLM parses constraints in its server's event loop and compiles them in the engine's process, without a limit for most
kinds: a schema of a megabyte can hold both for minutes, and what crashes the compiler ends the server. Only what has
compiled here in time goes on. A constraint that passed is remembered.
"""

from __future__ import annotations

import hashlib
import json
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer_plugin import envs

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

START_TIMEOUT_S = 120.0  # of the child: it imports PyTorch
MAX_TEXT_BYTES = 1 << 20  # of one constraint; compiling grows faster than its length
MEMORY_BYTES = 4 << 30  # address space of the child beside its libraries
MAX_REMEMBERED = 4096
_CHILD = "deepinfer_plugin.grammar.compile_child"


class GrammarError(ValueError):
    """A constraint cannot be compiled, or not within the limits; a server answers it with status 400."""


def constraint_of(params: StructuredOutputsParams) -> tuple[str, str] | None:
    """Kind and text of what a request asks for, as ``compile_child`` takes them; None where nothing can go wrong.

    Raises:
        GrammarError: the schema is no JSON.
        VLLMValidationError: it is nested deeper than vLLM allows (64 levels).
    """
    from vllm.sampling_params import check_json_nesting
    from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

    check_json_nesting(params.json)
    check_json_nesting(params.structural_tag, structural_tag=True)
    if params.json is not None:
        return "json", params.json if isinstance(params.json, str) else _dumped(params.json)
    if params.regex is not None:
        return "regex", params.regex
    if params.choice:
        return "grammar", choice_as_grammar(params.choice)
    if params.grammar is not None:
        return "lark" if grammar_is_likely_lark(params.grammar) else "grammar", params.grammar
    if params.structural_tag is not None:
        return "structural_tag", params.structural_tag
    return None


def _dumped(schema: object) -> str:
    try:
        return json.dumps(schema)
    except (RecursionError, ValueError, TypeError) as error:
        raise GrammarError(f"structured output: the schema is no JSON ({error}), expected one; correct it") from None


class GrammarGate:
    """Checks constraints one after the other in one child, which is started on first use and after each kill.

    Safe to use from several threads. ``close`` ends the child; it also ends when this process does.
    """

    def __init__(self, tokenizer_info: Callable[[], str], timeout_s: float) -> None:
        """Args:
        tokenizer_info: makes ``xgrammar.TokenizerInfo.serialize_json()`` of the engine's tokenizer.
        timeout_s: limit for one constraint, > 0.
        """
        self._tokenizer_info = tokenizer_info
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, kind: str, text: str) -> None:
        """Return if the constraint compiles within the limits.

        Args:
            kind: one of ``compile_child.KINDS``.
            text: the constraint.

        Raises:
            GrammarError: it does not; the text says why.
        """
        data = text.encode("utf-8", "surrogatepass")
        if len(data) > MAX_TEXT_BYTES:
            raise GrammarError(
                f"structured output: the {kind} has {len(data)} bytes, expected at most {MAX_TEXT_BYTES}; shorten it"
            )
        if "\0" in text:
            raise GrammarError(f"structured output: the {kind} holds a NUL character, expected none; remove it")
        key = hashlib.sha256(kind.encode() + b"\0" + data).digest()
        with self._lock:
            if key in self._passed:
                self._passed.move_to_end(key)
                return
            wrong = self._compile(kind, text)
            if wrong is not None:
                raise GrammarError(f"structured output: the {kind} does not compile ({wrong}); correct or simplify it")
            self._passed[key] = None
            if len(self._passed) > MAX_REMEMBERED:
                self._passed.popitem(last=False)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._kill()

    def _compile(self, kind: str, text: str) -> str | None:
        self._start()
        assert self._process is not None
        started = time.monotonic()
        answer = self._ask(json.dumps([kind, text]), self._timeout_s)
        if answer is not _NO_ANSWER:
            return None if answer is None else _first_line(str(answer))
        took_s = time.monotonic() - started
        self._kill()
        if took_s >= self._timeout_s:
            return f"not within {self._timeout_s:g} s"
        return "the compiler crashed or ran out of memory"

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", _CHILD, str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=envs.child_environment({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}),
        )
        if self._ask(json.dumps(self._tokenizer_info()), START_TIMEOUT_S) != "ready":
            self._kill()
            raise GrammarError("structured output: the compiler's process did not start; see the server's memory")

    def _ask(self, line: str, timeout_s: float) -> Any:
        """The child's next line, parsed, or ``_NO_ANSWER`` where it ends or lets the time pass."""
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except OSError:
            return _NO_ANSWER
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return _NO_ANSWER
        answer = stdout.readline()
        return json.loads(answer) if answer.endswith(b"\n") else _NO_ANSWER

    def _kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None


_NO_ANSWER = object()


def _first_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."
