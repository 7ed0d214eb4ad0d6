"""A server that passes every request on to another one and writes down what was asked and what was answered.

Tests put it between the program and a real server, where it sees which samples are asked again after a kill.
"""

from __future__ import annotations

from typing import Any

import httpx

from deepinfer_evals.fake_server import FakeServer
from deepinfer_plugin.provenance_endpoint import PATH as PROVENANCE_PATH
from deepinfer_plugin.witness import CHAT


class Relay(FakeServer):
    """Used as a context, like ``FakeServer``."""

    def __init__(self, upstream: str) -> None:
        super().__init__()
        limits = httpx.Limits(max_connections=128)
        self._http = httpx.Client(base_url=upstream, timeout=600.0, limits=limits, trust_env=False)
        self.documents = {path: self._http.get(path).json() for path in ("/v1/models", "/version", PROVENANCE_PATH)}

    def document(self, path: str) -> Any:
        """What the upstream said when the relay was made."""
        return self.documents.get(path)

    def respond(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The upstream's answer."""
        response = self._http.post(CHAT, json=request)
        return response.status_code, response.json()
