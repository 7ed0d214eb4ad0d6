"""Images in the encoder passes of bounded replay: rows of a span that is computed again are encoded again.

An image's features depend on the image alone, so encoding it again gives the bits of the first time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner

from deepinfer_plugin.replay import counters
from deepinfer_plugin.replay.inputs import EncoderPassInputs
from deepinfer_plugin.replay.plan import EncoderPass
from deepinfer_plugin.worker.image_state import ImageState

if TYPE_CHECKING:
    import numpy.typing as npt

    from deepinfer_plugin.model.flash import DeepseekV41ForCausalLM


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """Images of one step: spans, the model, vLLM's encoder, and the rows at the entry of the step."""

    state: ImageState
    model: DeepseekV41ForCausalLM
    encoder: EncoderRunner
    inputs_embeds: torch.Tensor | None

    def with_images(
        self, inputs: EncoderPassInputs, one: EncoderPass, slots: npt.NDArray[np.int64]
    ) -> EncoderPassInputs:
        """Add the image rows of a pass.

        Args:
            inputs: of the pass, as text.
            one: its plan.
            slots: [num_rows] slot of each row's request.
        """
        rows = self.state.pass_rows(slots, one.positions)
        if rows is None:
            return inputs
        assert self.inputs_embeds is not None
        embeds = self.model.embed_input_ids(inputs.input_ids)
        embeds[inputs.own_rows] = self.inputs_embeds[inputs.step_rows]
        self.state.fill_replayed(embeds, slots, one.positions, one.source_rows < 0, self._encode)
        return replace(
            inputs,
            inputs_embeds=embeds,
            is_image=rows.is_image,
            lookback_ids=rows.block(inputs.lookback_ids, inputs.positions),
        )

    def _encode(self, feature: MultiModalFeatureSpec) -> torch.Tensor:
        cached: torch.Tensor | None = self.encoder.encoder_cache.encoder_outputs.get(feature.identifier)
        if cached is not None:
            return cached
        assert feature.data is not None, f"image {feature.identifier} came without its patches"
        counters.count_encoded_again()
        spans: list[torch.Tensor] = self.encoder.execute_mm_encoder([(feature.modality, feature.data)])
        return spans[0]
