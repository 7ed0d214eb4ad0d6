"""``demo``: a server on a small random checkpoint: a streamed answer, one about a picture, one alone and in a crowd."""

from __future__ import annotations

import argparse
import base64
import contextlib
import shutil
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from deepinfer_plugin.cli.console import say, say_part
from deepinfer_plugin.cli.server import Server, free_port
from deepinfer_plugin.errors import SettingError

MODEL_NAME = "demo"
NUM_OTHERS = 15
NUM_TOKENS = 24
NUM_TOP = 5
PICTURE = (1, 150, 90)  # recipe: seed, width, height
PROBE = "the quick brown fox jumps over the lazy dog, and then"
FLAGS = (
    f"--served-model-name={MODEL_NAME}",
    "--max-model-len=2048",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=268435456",
    "--reasoning-parser=deepseek_v41",
    "--tool-call-parser=deepseek_v41",
    "--enable-auto-tool-choice",
)
DIFFERENT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion: token ids, the fp32 bits of the top log-probabilities of each, and when it ran."""

    token_ids: tuple[int, ...]
    logprob_bits: tuple[tuple[tuple[str, bytes], ...], ...]
    begin_s: float
    end_s: float


def add_parser(commands: Any) -> None:
    """Add the command's arguments."""
    parser = commands.add_parser("demo", help="serve a small random checkpoint and ask it something")
    parser.add_argument("--config", choices=("tiny", "nano"), default="tiny", help="size of the model (default tiny)")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="folder for checkpoint and log (default .demo)")
    parser.add_argument("--port", type=int, default=None, help="port on 127.0.0.1 (default: a free one)")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="longest wait for health (default 600)")
    parser.add_argument("--keep", action="store_true", help="leave the server running until Ctrl-C")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the demonstration; 0, or 1 where the two answers differ."""
    if arguments.port is not None and not 1 <= arguments.port <= 65535:
        raise SettingError(f"demo: --port is {arguments.port}, expected 1 to 65535")
    model = _write_checkpoint(arguments.dir.resolve(), arguments.config)
    log = arguments.dir.resolve() / "server.log"
    with Server(model, log, arguments.port or free_port(), FLAGS) as server:
        say("2  server: " + " ".join(server.command))
        healthy_s = server.wait_until_healthy(arguments.timeout_s)
        say(f"   healthy after {healthy_s:.1f} s at {server.base_url}")
        try:
            is_equal = _ask(server)
        except Exception:
            server.check_alive()  # if the server died, its log says more than the client
            raise
        resident, count = server.resident_bytes()
        say(f"6  server: healthy after {healthy_s:.1f} s, {resident / 2**30:.2f} GiB resident in {count} processes")
        if arguments.keep:
            _keep(server, model)
    say("7  server stopped")
    return 0 if is_equal else DIFFERENT


def _write_checkpoint(folder: Path, config: str) -> Path:
    model = folder / config
    say(f"1  checkpoint: {config}, seed 0, random weights in the released format -> {model}")
    from deepinfer_plugin.reference.tiny import write_checkpoint

    try:
        shutil.rmtree(model, ignore_errors=True)
        say(f"   content hash {write_checkpoint(config, 0, model)}")
    except OSError as error:
        raise SettingError(f"demo: --dir is {folder}, which cannot be written ({error}); choose another") from None
    return model


def _ask(server: Server) -> bool:
    from openai import OpenAI

    client = OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=300, max_retries=0)
    _stream(client)
    _ask_about_a_picture(client)
    return _alone_and_in_a_crowd(client)


def _stream(client: Any) -> None:
    """One streamed chat completion; random weights speak nonsense."""
    say("3  streamed chat completion (the weights are random, so is the text):")
    begin_s = time.monotonic()
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "who are you?"}],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=48,
        temperature=1.0,
        seed=7,
        extra_body={"ignore_eos": True},
    )
    say_part("   | ")
    num_tokens = 0
    for chunk in stream:
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text = getattr(choice.delta, "reasoning", None) or choice.delta.content or ""
            say_part(text.replace("\n", "\n   | "))
    elapsed_s = time.monotonic() - begin_s
    say(f"\n   {num_tokens} tokens in {elapsed_s:.1f} s")


def _ask_about_a_picture(client: Any) -> None:
    """One chat completion with a picture as a data URL."""
    from deepinfer_plugin.reference.pictures import make_picture

    say(f"4  one picture, {PICTURE[1]} x {PICTURE[2]} pixels, as a data URL in a chat message:")
    begin_s, buffer = time.monotonic(), BytesIO()
    make_picture(PICTURE).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [{"type": "text", "text": "what do you see?"}, {"type": "image_url", "image_url": {"url": url}}]
    completion = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": parts}],
        max_tokens=NUM_TOKENS,
        temperature=1.0,
        seed=7,
        extra_body={"ignore_eos": True},
    )
    message, usage = completion.choices[0].message, completion.usage
    text = (getattr(message, "reasoning", None) or "") + (message.content or "")
    say("   | " + text.replace("\n", "\n   | "))
    say(
        f"   {usage.prompt_tokens} prompt tokens with the picture's, {usage.completion_tokens} tokens in "
        f"{time.monotonic() - begin_s:.1f} s"
    )


def _alone_and_in_a_crowd(client: Any) -> bool:
    say(f"5  one completion alone, then again among {NUM_OTHERS} others:")
    alone = _complete(client, PROBE, seed=1)
    prompts = [f"{'a b c d e f g '[: 2 * (n % 7)]}neighbour {n}: " + "lorem ipsum " * n for n in range(NUM_OTHERS)]
    with ThreadPoolExecutor(NUM_OTHERS + 1) as pool:
        others = [pool.submit(_complete, client, prompt, seed=100 + n) for n, prompt in enumerate(prompts)]
        crowded = pool.submit(_complete, client, PROBE, seed=1).result()
        answers = [other.result() for other in others]
    beside = sum(a.begin_s < crowded.end_s and crowded.begin_s < a.end_s for a in answers)
    tokens_agree = alone.token_ids == crowded.token_ids
    bits_agree = alone.logprob_bits == crowded.logprob_bits
    say(f"   {len(alone.token_ids)} tokens, {beside} requests ran beside the second")
    say(f"   tokens agree: {'yes' if tokens_agree else 'NO'}")
    say(f"   log-probability bits agree: {'yes' if bits_agree else 'NO'} (top {NUM_TOP} of every token, fp32)")
    return tokens_agree and bits_agree


def _complete(client: Any, prompt: str, *, seed: int) -> Answer:
    begin_s = time.monotonic()
    completion = client.completions.create(
        model=MODEL_NAME,
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0.8,
        seed=seed,
        logprobs=NUM_TOP,
        extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True},
    )
    choice = completion.choices[0]
    bits = [
        tuple((token, struct.pack("<f", value)) for token, value in sorted(top.items()))
        for top in choice.logprobs.top_logprobs
    ]
    return Answer(token_ids=tuple(choice.token_ids), logprob_bits=tuple(bits), begin_s=begin_s, end_s=time.monotonic())


def _keep(server: Server, model: Path) -> None:
    """Leave the server running until Ctrl-C, which is how it is meant to end."""
    with contextlib.suppress(KeyboardInterrupt):
        say(f"   the server stays at {server.base_url} until Ctrl-C; for example:")
        say(
            f"   vllm bench serve --backend openai --base-url {server.base_url} --model {MODEL_NAME} "
            f"--tokenizer {model} --dataset-name random --random-input-len 64 --random-output-len 16 "
            "--num-prompts 16 --max-concurrency 8"
        )
        server.wait()
        server.check_alive()
