"""Run a soak against a server on this machine and report what it met."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from deepinfer_plugin.soak.traffic import BAD, GOOD, Call

TIMEOUT_S = 300.0
HOSTILE_SHARE = 0.3
SAMPLE_S = 2.0
WARM_UP_SHARE = 0.25  # of the duration, before the first reading of the memory
WINDOW_SHARE = 0.1  # of the duration, over which a reading is the median
MAX_KEPT = 20


@dataclass(kw_only=True)
class Report:
    """What a soak met. Empty lists, and a growth below the caller's bound, are what one hopes for."""

    duration_s: float = 0.0
    good: int = 0
    hostile: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    memory_start_mib: float = 0.0
    memory_end_mib: float = 0.0

    @property
    def memory_growth(self) -> float:
        """Relative growth of the memory after the warm-up."""
        return self.memory_end_mib / self.memory_start_mib - 1.0 if self.memory_start_mib else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "memory_growth": self.memory_growth}


def send(base_url: str, model: str, call: Call) -> tuple[int, bytes]:
    """Send one request; status 0 where the caller left or the connection broke, with what had come."""
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", call.path, call.payload(model), {"Content-Type": "application/json"})
        if call.leaves_after == 0:
            return 0, b""
        response = connection.getresponse()
        if call.leaves_after is not None:
            return 0, response.read(call.leaves_after)
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        return -1, repr(error).encode()
    finally:
        connection.close()


def answer_of(body: bytes) -> Any:
    """The part of an answer that must repeat: texts, token ids, log-probabilities and reasons."""
    value = json.loads(body)
    return [{key: item for key, item in choice.items() if key != "stop_reason"} for choice in value["choices"]]


def solo_answers(base_url: str, model: str, calls: Iterable[Call]) -> dict[str, Any]:
    """Each request alone on an idle server.

    Raises:
        RuntimeError: one of them is not answered.
    """
    found: dict[str, Any] = {}
    for call in calls:
        status, body = send(base_url, model, call)
        if status != 200:
            raise RuntimeError(f"soak: {call.name} alone has status {status}: {body[:300]!r}")
        found[call.name] = answer_of(body)
    return found


class Soak:
    """Threads that send requests until the time is over."""

    def __init__(self, base_url: str, model: str, solo: dict[str, Any], seed: int) -> None:
        self._base_url, self._model, self._solo, self._seed = base_url, model, solo, seed
        self._lock = threading.Lock()
        self._statuses: Counter[str] = Counter()
        self.report = Report()

    def run(self, duration_s: float, num_threads: int, memory_mib: Callable[[], float]) -> Report:
        """Send for ``duration_s`` from ``num_threads`` threads.

        Args:
            duration_s: no request is started later.
            num_threads: requests in flight.
            memory_mib: reads the memory of the server.

        Returns:
            The report.
        """
        started = time.monotonic()
        end = started + duration_s
        samples: list[tuple[float, float]] = []
        with ThreadPoolExecutor(num_threads) as pool:
            threads = [pool.submit(self._worker, index, end) for index in range(num_threads)]
            while time.monotonic() < end and not all(thread.done() for thread in threads):
                samples.append((time.monotonic() - started, memory_mib()))
                time.sleep(SAMPLE_S)
            for thread in threads:
                thread.result()
        self.report.duration_s = time.monotonic() - started
        self.report.statuses = dict(sorted(self._statuses.items()))
        warm, window = WARM_UP_SHARE * duration_s, WINDOW_SHARE * duration_s
        self.report.memory_start_mib = _median(m for t, m in samples if warm <= t < warm + window)
        self.report.memory_end_mib = _median(m for t, m in samples if t >= duration_s - window)
        return self.report

    def _worker(self, index: int, end: float) -> None:
        source = random.Random(f"{self._seed} {index}")
        while time.monotonic() < end:
            is_hostile = source.random() < HOSTILE_SHARE
            self.check(source.choice(BAD if is_hostile else GOOD), is_hostile)

    def check(self, call: Call, is_hostile: bool) -> None:
        """Send one request and note what is wrong with its answer."""
        status, body = send(self._base_url, self._model, call)
        wrong = ""
        if call.leaves_after is not None:
            wrong = "" if status == 0 else f"status {status}"
        elif status not in call.expected:
            wrong = f"status {status}: {body[:200]!r}"
        differs = not is_hostile and not wrong and answer_of(body) != self._solo[call.name]
        with self._lock:
            self._statuses[str(status)] += 1
            self.report.good += not is_hostile
            self.report.hostile += is_hostile
            if wrong and len(self.report.unexpected) < MAX_KEPT:
                self.report.unexpected.append(f"{call.name}: {wrong}")
            if differs and len(self.report.differing) < MAX_KEPT:
                self.report.differing.append(call.name)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0
