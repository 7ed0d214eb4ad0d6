"""Files of every hostile kind end in one error before or while they are decoded; valid ones are read as they look."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepinfer_plugin.errors import PromptError
from deepinfer_plugin.images import decode
from deepinfer_plugin.images.__main__ import RELEASED, outcome
from deepinfer_plugin.images.corpus import KINDS, corpus, file_of, png
from deepinfer_plugin.images.decode import ImageIO
from deepinfer_plugin.images.preprocess import picture_hash
from deepinfer_plugin.reference.pictures import make_picture


def _reader() -> ImageIO:
    reader = ImageIO()
    reader.config = RELEASED
    return reader


def _load(data: bytes) -> Image.Image:
    media: Image.Image = _reader().load_bytes(data).media
    return media


def _saved(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_the_corpus_ends_as_it_must(kind: str) -> None:
    assert {outcome(file_of(kind, seed)) for seed in range(12)} <= {"served", "refused"}


def test_a_part_of_the_corpus_holds_both_outcomes() -> None:
    assert {outcome(file) for file in corpus(7, 60)} == {"served", "refused"}


def test_limits_come_before_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    for data, words in (
        (png(9000, 9000), "81000000 pixels, expected at most 67108864"),
        (png(10_000, 1), "too narrow"),
        (png(1, 10_000), "too narrow"),
        (png(30, 30, depth=16, kind=0), "channels of 8 bits"),
    ):
        with pytest.raises(PromptError, match=words):
            _load(data)


def test_a_file_beyond_the_limit_of_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decode, "MAX_FILE_BYTES", 10)
    with pytest.raises(PromptError, match="has 11 bytes"):
        _load(bytes(11))
    (tmp_path / "a.png").write_bytes(bytes(11))
    with pytest.raises(PromptError, match="more than 10 bytes"):
        _reader().load_file(tmp_path / "a.png")
    with pytest.raises(PromptError, match="is no file"):
        _reader().load_file(tmp_path)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = make_picture((5, 60, 40))
    turned = _load(_saved(picture, "PNG", exif=exif))
    assert turned.size == ((60, 40) if orientation < 5 else (40, 60))
    assert (orientation == 1) == (
        turned.size == picture.size and np.array_equal(np.asarray(turned), np.asarray(picture))
    )


def test_transparency_stands_on_white_and_other_modes_become_rgb() -> None:
    clear = _load(_saved(Image.new("RGBA", (20, 20), (9, 9, 9, 0)), "PNG"))
    assert clear.mode == "RGB"
    assert clear.getpixel((3, 3)) == (255, 255, 255)
    cmyk = _load(_saved(Image.new("CMYK", (20, 20), (0, 255, 255, 0)), "JPEG"))
    red = cmyk.getpixel((3, 3))
    assert isinstance(red, tuple)
    assert red[0] > 200 > 60 > red[1]


def test_the_name_of_an_image_in_caches_is_its_content_not_its_claim() -> None:
    exif = Image.Exif()
    exif[0xA420] = "3f2504e0-4f89-11d3-9a0c-0305e82c3301"  # ImageID, which vLLM would believe
    first, second = (_load(_saved(make_picture((seed, 50, 50)), "PNG", exif=exif)) for seed in (1, 2))
    assert picture_hash(first) != picture_hash(second)
    assert picture_hash(first) == picture_hash(_load(_saved(make_picture((1, 50, 50)), "BMP")))
    assert picture_hash(Image.new("RGB", (4, 9))) != picture_hash(Image.new("RGB", (9, 4)))
