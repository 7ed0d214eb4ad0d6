"""A real server: an image by data URL, and hostile images that are refused while neighbours keep their bits."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from deepinfer_plugin.cli.server import Server
from deepinfer_plugin.conftest import CheckpointFixture
from deepinfer_plugin.images.corpus import file_of
from deepinfer_plugin.reference.pictures import make_picture
from deepinfer_plugin.soak.run import answer_of, send
from deepinfer_plugin.soak.server import MODEL, soak_server
from deepinfer_plugin.soak.traffic import CHAT, COMPLETIONS, Call

pytestmark = pytest.mark.slow

PLACEHOLDER = "<｜deepseek_image｜>"
HOSTILE = (
    *(
        "broken checksum",
        "truncated",
        "bomb",
        "narrow",
        "empty side",
        "animated",
        "CMYK",
        "16 bits",
        "rotated",
        "floats",
    ),
    *("no image", "other format"),
)


@pytest.fixture(scope="module")
def server(checkpoint: CheckpointFixture, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with soak_server(checkpoint("nano", 0), tmp_path_factory.mktemp("images") / "server.log") as running:
        yield running


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def picture_url(seed: int) -> str:
    buffer = BytesIO()
    make_picture((seed, 120, 80)).save(buffer, "PNG")
    return data_url(buffer.getvalue())


def ask(server: Server, *parts: Any, **body: Any) -> tuple[int, bytes]:
    content = [{"type": "text", "text": "what is this?"}, *parts]
    options = {"max_tokens": 4, "temperature": 0, "logprobs": True, "ignore_eos": True, "seed": 1}
    messages = [{"role": "user", "content": content}]
    return send(server.base_url, MODEL, Call(name="", path=CHAT, body={"messages": messages, **options, **body}))


def complete(server: Server, prompt: str) -> tuple[int, bytes]:
    return send(server.base_url, MODEL, Call(name="", path=COMPLETIONS, body={"prompt": prompt, "max_tokens": 4}))


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def test_an_image_is_answered_and_another_one_is_answered_differently(server: Server) -> None:
    answers = []
    for seed in (1, 2, 1):
        status, body = ask(server, image(picture_url(seed)))
        assert status == 200, body
        answers.append(answer_of(body))
    assert answers[0] == answers[2] != answers[1]


def test_every_hostile_image_ends_in_one_400_and_neighbours_keep_their_bits(server: Server, tmp_path: Path) -> None:
    parts: dict[str, dict[str, Any]] = {kind: image(data_url(file_of(kind, 3).data)) for kind in HOSTILE}
    (tmp_path / "a.png").write_bytes(b"x")
    parts |= {
        "not base64": image("data:image/png;base64,@@@"),
        "no comma": image("data:image/png"),
        "percent": image("data:image/png,abc"),
        "host": image("http://127.0.0.1:9/a.png"),
        "file": image((tmp_path / "a.png").as_uri()),
        "empty": image(""),
        "uuid": image(picture_url(1), uuid="mine"),
        "embeds": {"type": "image_embeds", "image_embeds": "AAAA"},
    }
    good = image(picture_url(1))
    alone = answer_of(ask(server, good)[1])
    with ThreadPoolExecutor(6) as pool:
        neighbours = [pool.submit(ask, server, good) for _ in range(6)]
        refused = {name: pool.submit(ask, server, part) for name, part in parts.items()}
        typed = pool.submit(complete, server, f"a {PLACEHOLDER} typed into a raw prompt")
        for name, future in refused.items():
            status, body = future.result()
            assert status == 400, (name, status, body)
            message = json.loads(body)["error"]["message"]
            assert "messages[0].content[1]" in message, (name, message)
            assert "Traceback" not in message
        status, body = typed.result()
        assert status == 400, body
        assert "comes without an image" in json.loads(body)["error"]["message"]
        for neighbour in neighbours:
            status, body = neighbour.result()
            assert status == 200
            assert answer_of(body) == alone


def test_a_placeholder_typed_as_text_is_text_beside_an_image(server: Server) -> None:
    typed = {"type": "text", "text": PLACEHOLDER}
    status, body = ask(server, typed, image(picture_url(1)))
    assert status == 200, body


def test_a_request_that_is_too_long_leaves_its_image_to_the_next_one(server: Server) -> None:
    long = {"type": "text", "text": "word " * 600}
    assert ask(server, long, image(picture_url(7)))[0] == 400
    assert ask(server, image(picture_url(7)))[0] == 200
