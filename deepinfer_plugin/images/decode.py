"""From the bytes of an image file to a picture; every limit is checked before pixels are decoded.

Pillow reads sizes from the header of a file, so that a file which announces too many pixels costs nothing.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from vllm import envs as vllm_envs
from vllm.multimodal.image import normalize_image
from vllm.multimodal.media import ImageMediaIO, MediaWithBytes

from deepinfer_plugin.errors import PromptError, SettingError
from deepinfer_plugin.images.layout import longest_column, longest_row
from deepinfer_plugin.model.config import VisionConfig

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
MAX_FILE_BYTES = 1 << 26
MAX_PIXELS = 1 << 26  # 192 MiB as RGB; the tower sees 1.8 million at most
_STILLS_OF_SEVERAL = ("MPO",)  # a photograph with a preview or a depth map behind it
_BYTES_PER_PIXEL = 4  # what vLLM charges to a request's budget
# One value of 8 bits per channel, or a palette of such. Pillow clips wider ones instead of scaling them.
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
_ORIENTATION = 0x0112  # EXIF tag
_TURNED = range(2, 9)  # its values for pixels that do not lie as the picture is to be seen
CONVERT = "convert"


class ImageIO(ImageMediaIO):
    """vLLM's image reader with our limits. ``config`` says which shapes the tower can take."""

    config: VisionConfig

    @property
    def converts(self) -> bool:
        """Whether the operator lets CMYK and rotated pictures be converted."""
        return converts({"image": self.kwargs})

    def load_bytes(self, data: bytes) -> MediaWithBytes[Image.Image]:
        """Decode one file. Where the operator allows conversions, EXIF data may turn it upright and CMYK becomes RGB.

        Args:
            data: the file.

        Raises:
            PromptError: no image, a damaged one, or one beyond a limit.
        """
        if len(data) > MAX_FILE_BYTES:
            raise PromptError(f"image: the file has {len(data)} bytes, expected at most {MAX_FILE_BYTES}; shrink it")
        with _one_error(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of sizes that are checked here
            image = Image.open(BytesIO(data), formats=FORMATS)
            check_picture(image, self.config)
            if self.decoded_budget is not None:
                self.decoded_budget.charge(image.width * image.height * _BYTES_PER_PIXEL)
            if not self.converts:
                check_plain(image)
            if image.format == "PNG":
                Image.open(BytesIO(data), formats=["PNG"]).verify()  # load() looks at no checksum of the pixels
            announced = image.size
            image.load()
            if image.size != announced:
                raise PromptError(f"image: decoding made {image.size} of {announced}, expected the size of the header")
            upright = normalize_image(image)
            picture = self._convert_image_mode(upright)
        return MediaWithBytes(picture, data)

    def load_file(self, filepath: Path) -> MediaWithBytes[Image.Image]:
        """Decode a local file that vLLM has found inside the folder which the operator allowed.

        Raises:
            PromptError: it cannot be read, or as ``load_bytes``.
        """
        if not filepath.is_file():
            raise PromptError("image: the path is no file, expected an image file; correct the URL")
        if filepath.stat().st_size > MAX_FILE_BYTES:
            raise PromptError(f"image: the file has more than {MAX_FILE_BYTES} bytes; shrink it")
        return self.load_bytes(filepath.read_bytes())

    def get_max_bytes(self) -> int | None:
        """vLLM stops a download there."""
        return MAX_FILE_BYTES


def check_picture(image: Image.Image, config: VisionConfig) -> None:
    """Refuse a picture that the tower cannot take in one well-defined way; reads no pixels.

    Raises:
        PromptError: names the limit.
    """
    width, height = image.size
    limit = min(MAX_PIXELS, vllm_envs.VLLM_MAX_IMAGE_PIXELS or MAX_PIXELS)
    if width < 1 or height < 1:
        raise PromptError(f"image: {width} x {height} pixels, expected at least one")
    if width * height > limit:
        raise PromptError(
            f"image: {width} x {height} are {width * height} pixels, expected at most {limit}; shrink the image"
        )
    row, column = longest_row(config), longest_column(config)
    if width > row * height or height > column * width:
        raise PromptError(
            f"image: {width} x {height} is too narrow, expected at most {row} times as wide as high and {column} times "
            "as high as wide; crop or pad the image"
        )
    if image.mode not in _MODES:
        raise PromptError(
            f"image: pixels of the kind {image.mode!r}, expected channels of 8 bits; convert the image to RGB"
        )
    if getattr(image, "is_animated", False) and image.format not in _STILLS_OF_SEVERAL:
        raise PromptError("image: the file holds several frames, expected a still image; send one frame")


def check_plain(image: Image.Image) -> None:
    """Refuse a picture that becomes RGB in more than one way; reads no pixels but those in front of a PNG's EXIF data.

    The model takes RGB pixels: its own preprocessing names neither a colour profile nor a rotation.

    Raises:
        PromptError: names what would have to be converted.
    """
    hint = f'or let the operator start with --media-io-kwargs \'{{"image": {{"{CONVERT}": true}}}}\''
    if image.mode == "CMYK":
        raise PromptError(f"image: the pixels are CMYK, expected RGB or gray; convert the image, {hint}")
    orientation = None
    with contextlib.suppress(Exception):  # EXIF data that cannot be read turns nothing
        orientation = image.getexif().get(_ORIENTATION)
    if orientation in _TURNED:
        raise PromptError(
            f"image: its EXIF data asks for a rotation (orientation {orientation}), expected an upright image; turn "
            f"the pixels and save it without that entry, {hint}"
        )


def converts(media_io_kwargs: Mapping[str, Mapping[str, Any]] | None) -> bool:
    """The operator's word on conversions, from vLLM's option of that name.

    Raises:
        SettingError: it is neither true nor false.
    """
    value = (media_io_kwargs or {}).get("image", {}).get(CONVERT, False)
    if not isinstance(value, bool):
        raise SettingError(f"--media-io-kwargs: {CONVERT} of image is {value!r}, expected true or false")
    return value


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Pillow's readers raise nearly anything on a damaged file; to a caller it is one kind of error."""
    try:
        yield
    except PromptError:
        raise
    except Exception as error:
        detail = str(error).partition("\n")[0][:120]
        raise PromptError(
            f"image: the file cannot be decoded ({type(error).__name__}: {detail}), expected one of "
            f"{', '.join(FORMATS)}; send a whole image file"
        ) from error
