"""Generated image files, valid and hostile: the same bytes for a seed with one version of Pillow."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO

from PIL import Image

from deepinfer_plugin.reference.pictures import make_picture

_ORIENTATION = 0x0112  # EXIF tag


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFile:
    """One file; ``is_valid`` None: it may turn out either way, but must not crash."""

    kind: str
    data: bytes
    is_valid: bool | None


def _encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def _picture(source: random.Random) -> Image.Image:
    return make_picture((source.randrange(1 << 30), source.randint(1, 300), source.randint(1, 300)))


def _valid(source: random.Random) -> bytes:
    picture = _picture(source)
    width, height = picture.size
    if max(width, height) > 20 * min(width, height):
        picture = picture.resize((max(width, 20), max(height, 20)))
    mode, file_format = source.choice(
        [("RGB", name) for name in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")]
        + [
            ("RGBA", "PNG"),
            ("RGBA", "WEBP"),
            ("LA", "PNG"),
            ("L", "JPEG"),
            ("1", "PNG"),
            ("P", "GIF"),
        ]
    )
    return _encoded(picture.convert(mode), file_format)


def _with_orientation(source: random.Random, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[_ORIENTATION] = orientation
    file_format = source.choice(("JPEG", "PNG", "TIFF", "WEBP"))
    return _encoded(make_picture((source.randrange(99), 90, 60)), file_format, exif=exif)


def _upright(source: random.Random) -> bytes:
    return _with_orientation(source, 1)


def _rotated(source: random.Random) -> bytes:
    return _with_orientation(source, source.randint(2, 8))


def _cmyk(source: random.Random) -> bytes:
    picture = make_picture((source.randrange(99), source.randint(20, 90), source.randint(20, 90)))
    return _encoded(picture.convert("CMYK"), source.choice(("JPEG", "TIFF")))


def _truncated(source: random.Random) -> bytes:
    data = _encoded(_picture(source), source.choice(("PNG", "BMP", "WEBP")))
    return data[: source.randrange(len(data) // 2)]


def _corrupt(source: random.Random) -> bytes:
    data = bytearray(_valid(source))
    for _ in range(source.randint(1, 40)):
        data[source.randrange(len(data))] = source.randrange(256)
    return bytes(data)


def _broken_checksum(source: random.Random) -> bytes:
    """Wrong bytes inside the compressed pixels, most of which would still be read as some picture."""
    data = bytearray(_encoded(make_picture((source.randrange(99), 120, 80)), "PNG"))
    first = source.randrange(200, len(data) - 600)
    data[first : first + 500] = bytes(500)
    return bytes(data)


def png(width: int, height: int, rows: bytes = b"", *, depth: int = 8, kind: int = 2) -> bytes:
    """A PNG file with any header; ``rows`` are the uncompressed rows."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _bomb(source: random.Random) -> bytes:
    side = source.choice((9000, 20000, 60000, 1 << 30))
    return png(side, side, bytes(1000))


def _real_bomb(source: random.Random) -> bytes:
    """Every pixel is there: 81 million that compress to nothing."""
    del source
    compressor = zlib.compressobj(9)
    row = bytes(1 + 9000)
    body = b"".join(compressor.compress(row) for _ in range(9000)) + compressor.flush()
    header = struct.pack(">IIBBBBB", 9000, 9000, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    chunks = [struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _narrow(source: random.Random) -> bytes:
    size = source.choice(((1, 10_000), (10_000, 1), (1, 1100), (2, 3000)))
    return _encoded(Image.new("RGB", size), source.choice(("PNG", "BMP")))


def _empty_side(source: random.Random) -> bytes:
    return png(*source.choice(((0, 5), (5, 0), (0, 0))))


def _animated(source: random.Random) -> bytes:
    frames = [make_picture((source.randrange(99) + i, 40, 30)) for i in range(3)]
    return _encoded(frames[0], source.choice(("GIF", "WEBP", "PNG", "TIFF")), save_all=True, append_images=frames[1:])


def _sixteen_bits(source: random.Random) -> bytes:
    image = Image.new("I;16", (source.randint(20, 60), source.randint(20, 60)), 40_000)
    return _encoded(image, source.choice(("PNG", "TIFF")))


def _floats(source: random.Random) -> bytes:
    return _encoded(Image.new("F", (30, source.randint(20, 40)), 0.5), "TIFF")


def _no_image(source: random.Random) -> bytes:
    return source.choice(
        (
            b"",
            b"\x89PNG\r\n\x1a\n",
            b"\xff\xd8\xff\xe0",
            b"GIF89a",
            b"<svg xmlns='http://www.w3.org/2000/svg'/>",
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            b"%PDF-1.7\n",
            b"PK\x03\x04",
            b"<html>image.png</html>",
            source.randbytes(source.randint(1, 4000)),
        )
    )


def _other_format(source: random.Random) -> bytes:
    return _encoded(make_picture((source.randrange(99), 32, 32)), source.choice(("ICO", "PPM", "TGA", "PCX", "SGI")))


_KINDS: tuple[tuple[str, int, Callable[[random.Random], bytes], bool | None], ...] = (
    ("valid", 40, _valid, True),
    ("upright", 2, _upright, True),
    ("rotated", 4, _rotated, False),
    ("CMYK", 4, _cmyk, False),
    ("corrupt", 20, _corrupt, None),
    ("broken checksum", 4, _broken_checksum, False),
    ("truncated", 8, _truncated, False),
    ("bomb", 4, _bomb, False),
    ("narrow", 4, _narrow, False),
    ("empty side", 3, _empty_side, False),
    ("animated", 4, _animated, False),
    ("16 bits", 4, _sixteen_bits, False),
    ("floats", 2, _floats, False),
    ("no image", 10, _no_image, False),
    ("other format", 3, _other_format, False),
)
KINDS = tuple(kind for kind, *_ in _KINDS)


def corpus(seed: int, count: int) -> Iterator[CorpusFile]:
    """``count`` files, kinds by weight; the last one is a bomb that has all its pixels."""
    source = random.Random(seed)
    weights = [weight for _, weight, _, _ in _KINDS]
    for _ in range(count - 1):
        kind, _, make, is_valid = source.choices(_KINDS, weights)[0]
        yield CorpusFile(kind=kind, data=make(source), is_valid=is_valid)
    yield CorpusFile(kind="bomb", data=_real_bomb(source), is_valid=False)


def file_of(kind: str, seed: int) -> CorpusFile:
    """One file of a kind."""
    make, is_valid = next((make, is_valid) for name, _, make, is_valid in _KINDS if name == kind)
    return CorpusFile(kind=kind, data=make(random.Random(seed)), is_valid=is_valid)
