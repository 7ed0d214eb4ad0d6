"""vLLM's interfaces of image input: what the model takes, dummy images, prompts with spans in the place of marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.exceptions import VLLMValidationError
from vllm.inputs import MultiModalDataDict
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    PromptReplacement,
    PromptUpdate,
)

from deepinfer_plugin.encoding.prompt import IMAGE_TOKEN
from deepinfer_plugin.errors import PromptError
from deepinfer_plugin.images.decode import check_picture, check_plain, converts
from deepinfer_plugin.images.layout import ImageLayout, largest_layout
from deepinfer_plugin.images.preprocess import picture_hash, to_patches
from deepinfer_plugin.model.config import ModelConfig, VisionConfig

MODALITY = "image"


class PictureParser(MultiModalDataParser):
    """Pictures that a program hands over, under the rules of files: vLLM would convert any of them to RGB, or clip it.

    Args:
        config: which shapes the tower can take.
        has_conversions: whether CMYK and rotated pictures are converted.
    """

    def __init__(self, config: VisionConfig | None, has_conversions: bool, **options: Any) -> None:
        super().__init__(**options)
        self._config, self._has_conversions = config, has_conversions

    def _parse_image_data(self, data: Any) -> ModalityDataItems[Any, Any] | None:
        pictures = data if isinstance(data, list) else [data]
        with _Refusing():
            for picture in pictures:
                if isinstance(picture, Image.Image) and self._config is not None:
                    check_picture(picture, self._config)
                    if not self._has_conversions:
                        check_plain(picture)
        return super()._parse_image_data(data)


class ImageInfo(BaseProcessingInfo):
    """Limits of the model."""

    @cached_property
    def config(self) -> ModelConfig:
        """The checked config.json."""
        return ModelConfig.from_hf(self.get_hf_config())

    @property
    def vision(self) -> VisionConfig:
        """Sizes of the tower; only asked for where images are supported."""
        assert self.config.vision_config is not None
        return self.config.vision_config

    def get_hf_processor(self, **kwargs: object) -> Any:
        """There is none: the pictures are processed here."""
        if kwargs:
            raise PromptError(
                f"image: mm_processor_kwargs is {sorted(kwargs)}, expected none: the checkpoint fixes how images are "
                "processed; leave it out"
            )
        return None

    def get_data_parser(self) -> PictureParser:
        """With our checks in front of vLLM's conversions."""
        options = self.ctx.get_mm_config().media_io_kwargs
        return PictureParser(self.config.vision_config, converts(options))

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Any number of images, or none for a checkpoint without a tower."""
        return {MODALITY: None if self.config.vision_config is not None else 0}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int] | None:
        """Positions of the longest span."""
        del seq_len, mm_counts
        return {MODALITY: self.vision.max_image_tokens} if self.config.vision_config is not None else {}


class DummyImages(BaseDummyInputsBuilder[ImageInfo]):
    """Images with the most patches, for runs that measure memory."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return IMAGE_TOKEN * mm_counts.get(MODALITY, 0)

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        del seq_len
        layout = largest_layout(self.info.vision)
        scale = 1
        while layout.width * layout.height * scale**2 < self.info.vision.min_pixels:
            scale += 1  # below it the shape would be rounded anew
        return {
            MODALITY: self._get_dummy_images(
                width=layout.width * scale,
                height=layout.height * scale,
                num_images=mm_counts.get(MODALITY, 0),
                overrides=mm_options.get(MODALITY),
            )
        }


class ImageProcessor(BaseMultiModalProcessor[ImageInfo]):
    """Pictures to patches, and marks of a prompt to spans of ``image_token_id``."""

    def _call_hf_processor(self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        with _Refusing():
            self.info.get_hf_processor(**hf_kwargs)
            pictures = hf_data.get("images")
            assert isinstance(pictures, list)
            parts = [to_patches(_picture(each), self.info.vision) for each in pictures]
        grids = [(layout.patches_high, layout.patches_wide) for _, layout in parts]
        return BatchFeature(
            {"patches": torch.cat([patches for patches, _ in parts]), "grid": torch.tensor(grids, dtype=torch.int64)}
        )

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        del hf_processor_mm_kwargs
        grid = hf_inputs.get("grid")
        sizes = torch.empty(0, dtype=torch.int64) if grid is None else grid.prod(dim=-1)
        return {
            "patches": MultiModalFieldConfig.flat_from_sizes(MODALITY, sizes),
            "grid": MultiModalFieldConfig.batched(MODALITY, keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        del mm_items, hf_processor_mm_kwargs
        mark = self.info.config.image_token_id

        def span(item: int) -> list[int]:
            high, wide = out_mm_kwargs[MODALITY][item]["grid"].data.tolist()
            return [mark] * ImageLayout.of_patches(high, wide, self.info.vision).num_tokens

        return [PromptReplacement(modality=MODALITY, target=[mark], replacement=span)]

    def _maybe_apply_prompt_updates(self, mm_items: MultiModalDataItems, mm_res: Any) -> Any:
        """With more marks than images it would be a guess which of them are text."""
        num_images, mark = mm_items.get_all_counts().get(MODALITY, 0), self.info.config.image_token_id
        num_marks = mm_res.prompt_ids.count(mark)
        if num_marks != num_images:
            raise VLLMValidationError(
                f"image: the prompt holds {num_marks} tokens {IMAGE_TOKEN} ({mark}) and {num_images} images, expected "
                "one token per image; correct the prompt"
            )
        return super()._maybe_apply_prompt_updates(mm_items, mm_res)

    def _get_mm_hashes(self, inputs: Any) -> dict[str, list[str]]:
        """By content alone: an id of the request or of the file could make two images one in the caches."""
        with _Refusing():
            items = inputs.mm_data_items
            return {modality: [picture_hash(_picture(each)) for each in items[modality]] for modality in items}


def _picture(given: Any) -> Image.Image:
    picture = given.media if isinstance(given, MediaWithBytes) else given
    if not isinstance(picture, Image.Image):
        raise PromptError(f"image: a {type(given).__name__} was given, expected a PIL image; convert it")
    return picture


class _Refusing:
    """Our refusals as the error that vLLM's servers answer with status 400."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PromptError):
            raise VLLMValidationError(str(error)) from error
