"""The provenance of a server, through the middleware around a small ASGI application."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from collections.abc import MutableMapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepinfer_plugin import provenance_endpoint
from deepinfer_plugin.provenance_endpoint import PATH, ProvenanceMiddleware, checkpoint_hashes

CODE = {"deepinfer_kernels.linear": "0" * 16}


class Engine:
    """Answers the call of the engine process as vLLM's client does, or fails as it does without our extension."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    async def collective_rpc(self, method: str, timeout: float | None = None) -> list[dict[str, str]]:
        assert timeout is not None
        if self.error:
            raise RuntimeError(self.error)
        assert method == "deepinfer_live_code"
        return [CODE]


def state(model: Path, *, model_type: str = "deepseek_v41", error: str = "") -> SimpleNamespace:
    config = SimpleNamespace(model=str(model), revision=None, hf_config=SimpleNamespace(model_type=model_type))
    arguments = SimpleNamespace(max_model_len=64, max_num_seqs=4, reasoning_parser=object(), api_key="secret")
    return SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=config), args=arguments, engine_client=Engine(error)
    )


async def _passed_on(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "passed on"})


def get(app_state: SimpleNamespace, path: str = PATH, times: int = 1) -> tuple[int, dict[str, Any]]:
    """Status and body of the last of some GETs; (0, {}) where the request was passed on."""
    messages: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        messages.append(message)

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request"}

    async def ask() -> None:
        middleware = ProvenanceMiddleware(_passed_on)
        scope = {"type": "http", "method": "GET", "path": path, "app": SimpleNamespace(state=app_state)}
        for _ in range(times):
            messages.clear()
            await middleware(scope, receive, send)

    asyncio.run(ask())
    if messages[0]["type"] == "passed on":
        return 0, {}
    return int(messages[0]["status"]), json.loads(messages[1]["body"])


def test_it_names_what_an_answer_depends_on(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    (tmp_path / ".hidden").write_bytes(b"x")
    status, found = get(state(tmp_path), times=2)
    assert status == 200
    assert found["checkpoint"] == {"a.safetensors": hashlib.sha256(b"weights").hexdigest()}
    assert found["code"] == CODE
    assert found["options"]["max_model_len"] == 64
    assert found["schedule"]["max_num_seqs"] == 4
    assert found["versions"]["deepinfer-plugin"]
    assert found["machine"]["kernel_set"]
    assert found["batch_invariant"] is True
    assert "secret" not in json.dumps(found)


def test_another_model_is_not_called_batch_invariant(tmp_path: Path) -> None:
    status, found = get(state(tmp_path, model_type="llama"))
    assert status == 200
    assert found["batch_invariant"] is False
    assert found["code"] == {}


def test_a_foreign_worker_extension_leaves_the_code_out(tmp_path: Path) -> None:
    status, found = get(state(tmp_path, error="Worker has no attribute 'deepinfer_live_code'"))
    assert (status, found["code"]) == (200, {})


def test_a_failure_is_told_to_the_client(tmp_path: Path) -> None:
    status, found = get(state(tmp_path, error="engine is dead"))
    assert status == 500
    assert "engine is dead" in found["error"]
    assert get(state(tmp_path / "absent"))[0] == 500


def test_everything_else_is_passed_on(tmp_path: Path) -> None:
    assert get(state(tmp_path), path="/v1/models") == (0, {})


def test_a_changed_byte_of_the_checkpoint_changes_its_hash(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    before = checkpoint_hashes(tmp_path)
    (tmp_path / "a").write_bytes(bytes(99) + b"\1")
    assert before.keys() == checkpoint_hashes(tmp_path).keys()
    assert before != checkpoint_hashes(tmp_path)


def test_it_becomes_a_default_of_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--middleware", action="append", default=[])
    provenance_endpoint.add_to_server(parser)
    provenance_endpoint.add_to_server(parser)
    provenance_endpoint.add_to_server(None)
    assert parser.parse_args([]).middleware == [provenance_endpoint.CLASS_PATH]
