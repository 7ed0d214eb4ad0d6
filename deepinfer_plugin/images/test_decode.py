"""Files of every hostile kind end in one error before or while they are decoded; valid ones are read as they look."""

from __future__ import annotations

from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError

from deepinfer_plugin.errors import PromptError, SettingError
from deepinfer_plugin.images import decode
from deepinfer_plugin.images.__main__ import RELEASED, outcome
from deepinfer_plugin.images.corpus import KINDS, corpus, file_of, png
from deepinfer_plugin.images.decode import ImageIO
from deepinfer_plugin.images.preprocess import picture_hash
from deepinfer_plugin.images.processing import PictureParser
from deepinfer_plugin.reference.pictures import make_picture


def _reader(**options: object) -> ImageIO:
    reader = ImageIO(**options)
    reader.config = RELEASED
    return reader


def _load(data: bytes, **options: object) -> Image.Image:
    media: Image.Image = _reader(**options).load_bytes(data).media
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


def test_the_corpus_holds_every_kind_several_times() -> None:
    counts = Counter(file.kind for file in corpus(1, 500))  # the first quarter of the corpus of 2,000 files
    assert set(counts) == set(KINDS)
    assert min(counts.values()) >= 3, counts


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


def _photograph(picture: Image.Image, orientation: int, file_format: str = "PNG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _saved(picture, file_format, exif=exif)


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_a_rotation_by_exif_is_refused(orientation: int, file_format: str) -> None:
    data = _photograph(make_picture((5, 60, 40)), orientation, file_format)
    if orientation in (0, 1, 9):  # upright, or no orientation at all
        assert _load(data).size == (60, 40)
        return
    with pytest.raises(PromptError, match=rf"asks for a rotation \(orientation {orientation}\).*--media-io-kwargs"):
        _load(data)


@pytest.mark.parametrize("file_format", ["JPEG", "TIFF"])
def test_cmyk_is_refused(file_format: str) -> None:
    with pytest.raises(PromptError, match=r"CMYK, expected RGB or gray; convert the image, .*--media-io-kwargs"):
        _load(_saved(Image.new("CMYK", (20, 20)), file_format))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright_where_the_operator_says_so(orientation: int) -> None:
    picture = make_picture((5, 60, 40))
    turned = _load(_photograph(picture, orientation), convert=True)
    assert turned.size == ((60, 40) if orientation < 5 else (40, 60))
    assert (orientation == 1) == (
        turned.size == picture.size and np.array_equal(np.asarray(turned), np.asarray(picture))
    )


def test_transparency_stands_on_white_and_other_modes_become_rgb() -> None:
    clear = _load(_saved(Image.new("RGBA", (20, 20), (9, 9, 9, 0)), "PNG"))
    assert clear.mode == "RGB"
    assert clear.getpixel((3, 3)) == (255, 255, 255)
    cmyk = _load(_saved(Image.new("CMYK", (20, 20), (0, 255, 255, 0)), "JPEG"), convert=True)
    red = cmyk.getpixel((3, 3))
    assert isinstance(red, tuple)
    assert red[0] > 200 > 60 > red[1]


@pytest.mark.parametrize("value", ["true", 1, None])
def test_the_option_of_conversions_is_true_or_false(value: object) -> None:
    with pytest.raises(SettingError, match="expected true or false"):
        decode.converts({"image": {"convert": value}})
    assert not decode.converts(None)
    assert not decode.converts({"video": {}})
    assert decode.converts({"image": {"convert": True}})


def test_pictures_of_a_program_follow_the_rules_of_files() -> None:
    wrong = (
        (Image.new("CMYK", (20, 20)), "CMYK"),
        (Image.new("I;16", (20, 20)), "channels of 8 bits"),
        (Image.new("RGB", (1, 10_000)), "too narrow"),
        (Image.open(BytesIO(_photograph(make_picture((5, 60, 40)), 6))), "rotation"),
    )
    parser = PictureParser(RELEASED, has_conversions=False)
    for picture, words in wrong:
        with pytest.raises(VLLMValidationError, match=words):
            parser.parse_mm_data({"image": [make_picture((1, 30, 20)), picture]})
    converting = PictureParser(RELEASED, has_conversions=True)
    items = converting.parse_mm_data({"image": [wrong[0][0], wrong[3][0]]})["image"]
    assert [(items[index].mode, items[index].size) for index in (0, 1)] == [("RGB", (20, 20)), ("RGB", (40, 60))]


def test_the_name_of_an_image_in_caches_is_its_content_not_its_claim() -> None:
    exif = Image.Exif()
    exif[0xA420] = "3f2504e0-4f89-11d3-9a0c-0305e82c3301"  # ImageID, which vLLM would believe
    first, second = (_load(_saved(make_picture((seed, 50, 50)), "PNG", exif=exif)) for seed in (1, 2))
    assert picture_hash(first) != picture_hash(second)
    assert picture_hash(first) == picture_hash(_load(_saved(make_picture((1, 50, 50)), "BMP")))
    assert picture_hash(Image.new("RGB", (4, 9))) != picture_hash(Image.new("RGB", (9, 4)))
