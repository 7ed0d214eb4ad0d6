"""The soak notices what it is for: an answer that changes, a status that is wrong, a server that is gone."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deepinfer_plugin.soak.run import Soak, solo_answers
from deepinfer_plugin.soak.traffic import BAD, GOOD, Call

Answer = Callable[[str, bytes], tuple[int, object]]
CALL = Call(name="good", path="/v1/completions", body={"prompt": "a"})
HOSTILE = Call(name="bad", path="/v1/completions", body={"prompt": 1}, expected=frozenset({400}))


class Stub:
    """A server that answers as it is told."""

    def __init__(self) -> None:
        self.answer: Answer = lambda path, body: (200, {"choices": [{"text": "x", "logprobs": [-0.5]}]})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, value = outer.answer(self.path, body)
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_request(self, code: object = "-", size: object = "-") -> None:
                del code, size

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_the_same_answer_again_is_clean(stub: Stub) -> None:
    soak = Soak(stub.url, "m", solo_answers(stub.url, "m", [CALL]), 0)
    soak.check(CALL, False)
    assert (soak.report.good, soak.report.differing, soak.report.unexpected) == (1, [], [])


def test_one_changed_bit_of_a_log_probability_is_noticed(stub: Stub) -> None:
    soak = Soak(stub.url, "m", solo_answers(stub.url, "m", [CALL]), 0)
    stub.answer = lambda path, body: (200, {"choices": [{"text": "x", "logprobs": [-0.5000000000000001]}]})
    soak.check(CALL, False)
    assert soak.report.differing == ["good"]


def test_a_hostile_request_that_breaks_the_server_is_noticed(stub: Stub) -> None:
    soak = Soak(stub.url, "m", {}, 0)
    stub.answer = lambda path, body: (500, {})
    soak.check(HOSTILE, True)
    assert "bad: status 500" in soak.report.unexpected[0]
    stub.answer = lambda path, body: (400, {})
    soak.check(HOSTILE, True)
    assert (soak.report.hostile, len(soak.report.unexpected)) == (2, 1)


def test_a_server_that_is_gone_is_noticed(stub: Stub) -> None:
    soak = Soak("http://127.0.0.1:1", "m", {}, 0)
    soak.check(HOSTILE, True)
    assert "status -1" in soak.report.unexpected[0]
    with pytest.raises(RuntimeError, match="good alone has status -1"):
        solo_answers("http://127.0.0.1:1", "m", [CALL])


def test_growth_is_measured_after_the_warm_up(stub: Stub) -> None:
    sizes = iter([500.0] + [100.0 + i for i in range(1000)])
    soak = Soak(stub.url, "m", {call.name: [{"text": "x", "logprobs": [-0.5]}] for call in GOOD}, 0)
    report = soak.run(0.5, 2, lambda: next(sizes))
    assert report.good > 0
    assert report.hostile > 0
    assert report.memory_start_mib == 0.0, "one sample only: nothing to compare"
    assert report.memory_growth == 0.0


def test_the_traffic_has_every_kind_and_unique_names() -> None:
    names = [call.name for call in (*GOOD, *BAD)]
    assert len(names) == len(set(names))
    assert len(GOOD) >= 30
    assert sum(name.startswith("constraint") for name in names) >= 15
    assert all(json.loads(call.payload("m"))["model"] for call in GOOD)
