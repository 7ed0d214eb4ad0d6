"""An OpenAI-compatible server whose answers are a function of the request, for tests without an engine.

It solves what it is asked with some luck of the seed, so that scores are neither 0 nor 1, and writes down every request
when it arrives and when its answer was sent. It serves as a judge too. Faults are planted by changing ``mistake``.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from deepinfer_evals.canonical import canonical_json
from deepinfer_plugin.provenance_endpoint import PATH as PROVENANCE_PATH
from deepinfer_plugin.witness import witness_of

MODEL = "fake"
UNSEEDED = 77  # what it draws with where a request has no seed
CUT_SHARE = 0.1  # of answers that end at the length limit
PROVENANCE: dict[str, Any] = {
    "versions": {"deepinfer-plugin": "0", "vllm": "0"},
    "machine": {"accelerator": "cpu", "device_name": "fake", "kernel_set": "fake", "memory_mib": 1},
    "settings": {"batch_invariant": True},
    "patches": [],
    "batch_invariant": True,
    "checkpoint": {"model.safetensors": "0" * 64},
    "options": {"max_model_len": 2048},
    "schedule": {"max_num_seqs": 8},
    "code": {"kernels.linear": "0" * 16, "kernels.rope": "1" * 16},
}
_JUDGED = re.compile(
    r"<correct_answer>\n(?P<gold>.*?)\n</correct_answer>.*<response>\n(?P<text>.*)\n</response>", re.DOTALL
)


class FakeServer:
    """The server, used as a context.

    Attributes:
        requests: body of every request for an answer, in the order of arrival.
        sent: seeds of the answers that were sent whole.
        provenance: what it says of itself; None answers 404.
        mistake: changes the text to be hashed for an answer; the identity plants nothing.
    """

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.sent: list[int] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.provenance: dict[str, Any] | None = json.loads(json.dumps(PROVENANCE))
        self.mistake: Callable[[str], str] = str
        self.has_witness = True
        self.seed_error = 0  # added to the seed that an answer names
        self.failures_after = (0, 0)  # from this request on, so many answers are 503
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body for one request for an answer."""
        with self._lock:
            self.requests.append(request)
            first, count = self.failures_after
            if first < len(self.requests) <= first + count:
                return 503, {"error": "busy"}
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return self.respond(request)
        finally:
            with self._lock:
                self.in_flight -= 1

    def respond(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body, computed from the request."""
        time.sleep(self._delay_s)
        prompt = str(request["messages"][0]["content"])
        judged = _JUDGED.search(prompt)
        if judged is not None:
            same = "yes" if judged["text"].strip().endswith(judged["gold"]) else "no"
            return 200, _body(request, f"final answer: {judged['text'].strip()[-9:]}\nsame: {same}", "stop", [1], [2])
        body = self._drawn(request, prompt)
        body["seed"] += self.seed_error
        if not self.has_witness:
            body["choices"][0].pop("witness", None)
        return 200, body

    def document(self, path: str) -> Any:
        """What a GET of the path returns; None for nothing."""
        found: dict[str, Any] = {
            "/v1/models": {"data": [{"id": MODEL}]},
            "/version": {"version": "0.0-fake"},
            PROVENANCE_PATH: self.provenance,
        }
        return found.get(path)

    def note_sent(self, request: dict[str, Any]) -> None:
        """The answer left whole."""
        with self._lock:
            self.sent.append(int(request.get("seed") or 0))

    def _drawn(self, request: dict[str, Any], prompt: str) -> dict[str, Any]:
        unseen = ("model", "vllm_xargs", "logprobs")
        known = {"seed": UNSEEDED, **{name: value for name, value in request.items() if name not in unseen}}
        digest = hashlib.sha256(self.mistake(canonical_json(known)).encode("utf-8", "surrogatepass")).digest()
        ids = [digest[index] for index in range(4 + digest[0] % 12)]
        is_cut = digest[1] < 256 * CUT_SHARE
        text = f"I take \\boxed{{{digest[2] % 2}}}.\nAnswer: {'ABCD'[digest[3] % 4]}"
        return _body(request, text, "length" if is_cut else "stop", list(prompt.encode()[:64]), ids)


def _body(
    request: dict[str, Any], text: str, finish_reason: str, prompt_ids: list[int], ids: list[int]
) -> dict[str, Any]:
    scores = [-1.0 / (token + 1) for token in ids]
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "reasoning": "because"},
        "finish_reason": finish_reason,
        "token_ids": ids,
    }
    if "vllm_xargs" in request:
        choice["witness"] = witness_of(prompt_ids, ids, scores)
    if request.get("logprobs"):
        choice["logprobs"] = {"content": [{"logprob": score} for score in scores]}
    return {
        "seed": request.get("seed", UNSEEDED),
        "choices": [choice],
        "prompt_token_ids": prompt_ids,
        "usage": {"prompt_tokens": len(prompt_ids), "completion_tokens": len(ids)},
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone, as after a kill, is no error here."""


def _handler(owner: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            value = owner.document(self.path)
            self._send(200 if value is not None else 404, value or {})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, value = owner.answer(request)
            self._send(status, value)
            if status == 200:
                owner.note_sent(request)

        def _send(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the base class's name
            """Nothing on the test's output."""

    return Handler
