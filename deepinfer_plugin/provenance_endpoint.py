"""``GET /deepinfer/provenance`` of a server: everything that an answer depends on besides its request, as JSON.

``ProvenanceMiddleware`` is an ASGI middleware (``--middleware``; on by default with our platform). Importing this
module loads neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from deepinfer_plugin import provenance
from deepinfer_plugin.platforms.capabilities import Capabilities
from deepinfer_plugin.platforms.detect import current_decision
from deepinfer_plugin.server_middleware import add_middleware
from deepinfer_plugin.settings import Settings

PATH = "/deepinfer/provenance"
CLASS_PATH = f"{__name__}.ProvenanceMiddleware"
RPC_TIMEOUT_S = 120.0
MODEL_TYPE = "deepseek_v41"
# Options of vLLM that can change an answer; the rest, such as the size of a batch, must not, which is the promise.
ANSWER_OPTIONS = (
    "chat_template",
    "chat_template_content_format",
    "config_format",
    "default_chat_template_kwargs",
    "dtype",
    "generation_config",
    "hf_overrides",
    "kv_cache_dtype",
    "logits_processors",
    "max_logprobs",
    "max_model_len",
    "override_generation_config",
    "quantization",
    "reasoning_parser",
    "speculative_config",
    "structured_outputs_config",
    "tokenizer",
    "tokenizer_mode",
    "tool_call_parser",
)
SCHEDULE_OPTIONS = (
    "additional_config",
    "async_scheduling",
    "block_size",
    "data_parallel_size",
    "enable_chunked_prefill",
    "enable_eplb",
    "enable_expert_parallel",
    "enable_prefix_caching",
    "enforce_eager",
    "max_num_batched_tokens",
    "max_num_seqs",
    "pipeline_parallel_size",
    "tensor_parallel_size",
)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def add_to_server(parser: Any) -> None:
    """See ``add_middleware``."""
    add_middleware(CLASS_PATH, parser)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checkpoint_hashes(model: Path) -> dict[str, str]:
    """SHA-256 of each visible file of a checkpoint's folder, by name; every byte is read."""
    files = sorted(path for path in model.iterdir() if path.is_file() and not path.name.startswith("."))
    return {path.name: file_hash(path) for path in files}


class ProvenanceMiddleware:
    """Answers ``GET /deepinfer/provenance``; passes everything else on.

    The first answer waits until the checkpoint's files were read; later ones hold the same hashes.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self._checkpoint: asyncio.Task[dict[str, str]] | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        try:
            status, value = 200, await self._collect(scope["app"].state)
        except Exception as error:  # whatever is wrong, the client must read it
            status, value = 500, {"error": f"provenance: {type(error).__name__}: {error}"}
        body = json.dumps(value).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _collect(self, state: Any) -> dict[str, Any]:
        config = state.vllm_config
        is_ours = config.model_config.hf_config.model_type == MODEL_TYPE
        if self._checkpoint is None:
            self._checkpoint = asyncio.create_task(asyncio.to_thread(checkpoint_hashes, _folder(config.model_config)))
        decision = current_decision()
        settings = Settings.from_envs()
        found = {} if decision is None else provenance.collect(settings, Capabilities.from_decision(decision))
        return {
            **found,
            "batch_invariant": bool(is_ours and settings.batch_invariant and not settings.disable),
            "checkpoint": await self._checkpoint,
            "options": _options(state.args, ANSWER_OPTIONS),
            "schedule": _options(state.args, SCHEDULE_OPTIONS),
            "code": await _code(state.engine_client) if is_ours else {},
        }


async def _code(engine_client: Any) -> dict[str, str]:
    """Of the first worker; all run the same code. Empty where a user's own worker extension took the place of ours."""
    try:
        answers = await engine_client.collective_rpc("deepinfer_live_code", timeout=RPC_TIMEOUT_S)
    except Exception as error:
        if "deepinfer_live_code" in str(error):
            return {}
        raise
    return dict(answers[0])


def _folder(model_config: Any) -> Path:
    """Where the checkpoint lies: the folder that was named, or the local copy of a name on the hub."""
    folder = Path(model_config.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))


def _options(arguments: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Options as plain values; text for what JSON cannot hold."""
    found = {name: getattr(arguments, name, None) for name in names}
    value: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return value
