"""Images of chat messages: data URLs, files in the folder that the operator allowed, hosts that the operator named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from PIL import Image
from vllm.connections import MediaRequestDownloadBudget
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.media import MediaConnector, MediaWithBytes
from vllm.multimodal.media.base import MediaDecodedBudget

from deepinfer_plugin.errors import PromptError
from deepinfer_plugin.images.decode import ImageIO
from deepinfer_plugin.model.config import VisionConfig

if TYPE_CHECKING:
    from urllib3.util import Url
    from vllm.config import ModelConfig as EngineModelConfig

type Picture = MediaWithBytes[Image.Image] | Image.Image


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image of a message: where it stands, and its URL or the picture itself."""

    where: str
    source: str | Image.Image


class ImageConnector(MediaConnector):
    """vLLM's loader of media, with our reader, and without a host that nobody allowed."""

    def __init__(self, model_config: EngineModelConfig, config: VisionConfig) -> None:
        """A loader for the images of one request, which share budgets.

        Args:
            model_config: what the operator allows.
            config: which shapes the tower can take.
        """
        options = model_config.multimodal_config
        super().__init__(
            media_io_kwargs=None if options is None else options.media_io_kwargs,
            allowed_local_media_path=model_config.allowed_local_media_path,
            allowed_media_domains=model_config.allowed_media_domains,
            decoded_budget=MediaDecodedBudget(),
            download_budget=MediaRequestDownloadBudget(),
        )
        self._config = config

    def _image_io(self, image_mode: str | None = "RGB") -> ImageIO:
        options = {"image_mode": image_mode} | self.media_io_kwargs.get("image", {})
        reader = ImageIO(**options, decoded_budget=self.decoded_budget)
        reader.config = self._config
        return reader

    def _assert_url_in_allowed_media_domains(self, url_spec: Url) -> None:
        """vLLM fetches from every host where none is named; we from none."""
        if url_spec.hostname not in self.allowed_media_domains:
            raise PromptError(
                f"image: the host {url_spec.hostname} is not allowed, expected a data URL, or one of the hosts of "
                f"--allowed-media-domains {self.allowed_media_domains}"
            )

    def load(self, images: Sequence[ImageSource]) -> list[Picture]:
        """Decode the images of a request, one after the other.

        Raises:
            PromptError: names the part of the message and what is wrong with it.
        """
        found: list[Picture] = []
        for image in images:
            try:
                found.append(self.fetch_image(image.source) if isinstance(image.source, str) else image.source)
            except Exception as error:
                raise _with_place(image, error) from error
        return found

    async def load_async(self, images: Sequence[ImageSource]) -> list[Picture]:
        """The same without holding the event loop.

        Raises:
            PromptError: as ``load``.
        """
        found: list[Picture] = []
        for image in images:
            try:
                is_url = isinstance(image.source, str)
                found.append(await self.fetch_image_async(image.source) if is_url else image.source)
            except Exception as error:
                raise _with_place(image, error) from error
        return found


def _with_place(image: ImageSource, error: Exception) -> Exception:
    if isinstance(error, VLLMValidationError):  # of a download, with a status of its own
        return cast("Exception", error)
    detail = str(error).partition("\n")[0][:400] or type(error).__name__
    if isinstance(error, PromptError):
        return PromptError(f"chat: {image.where}: {detail}")
    return PromptError(f"chat: {image.where}: image: it cannot be loaded ({detail}); correct the URL")


def source_of(part: Any, where: str) -> ImageSource:
    """The image that a part of a message holds.

    Raises:
        PromptError: it holds none, or asks for something that would let two images pass for one.
    """
    kind, value = part.get("type"), part.get("image_url")
    if kind == "image_pil":
        value = part.get("image_pil")
    elif isinstance(value, dict):
        value = value.get("url")
    if part.get("uuid") is not None:
        raise PromptError(f"chat: {where}.uuid is set, expected none: images are known by their content; leave it out")
    if kind == "image_embeds" or not isinstance(value, str | Image.Image) or value == "":
        raise PromptError(
            f"chat: {where} is an image of the type {kind!r} without a URL, expected image_url with a data URL, or a "
            "file or host that the operator allows"
        )
    return ImageSource(where, value)
