"""Draws of drafts: with the parameters and the noise that the model itself will draw with."""

from typing import TYPE_CHECKING

import torch

from deepinfer_kernels.restrict_logits import restrict_logits
from deepinfer_kernels.sample_tokens import sample_tokens

if TYPE_CHECKING:
    from deepinfer_plugin.sampling.sampler import DeepInferSampler


class Draws:
    """Sampling parameters by slot of the runner, at addresses that a CUDA graph can read at every replay.

    vLLM hands the sampler another buffer wherever it stores parameters; ``refresh`` copies what that holds.
    """

    def __init__(self, sampler: "DeepInferSampler", device: torch.device) -> None:
        states = sampler.sampling_states
        self._sources = (
            states.temperature,
            states.top_k,
            states.top_p,
            states.min_p,
            states.seeds,
            sampler.prompt_hashes,
        )
        self._held = tuple(torch.empty_like(source.gpu, device=device) for source in self._sources)
        self._copied: list[torch.Tensor | None] = [None] * len(self._sources)
        self.refresh()

    def refresh(self) -> None:
        """Take over the parameters of the step, before its drafts are drawn; the same buffer holds the same ones."""
        for index, source in enumerate(self._sources):
            if source.gpu is not self._copied[index]:
                self._held[index].copy_(source.gpu)
                self._copied[index] = source.gpu

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """One token a row, [num_rows] int64.

        Penalties, masks and other rules of a request do not act here: where they change the model's token, the draft
        is rejected.

        Args:
            logits: [num_rows, vocab_size] fp32.
            slots: [num_rows] int64, slot of each request; negative: any.
            positions: [num_rows] int64, of the tokens to draw.
        """
        rows = slots.clamp_min(0)
        temperature, top_k, top_p, min_p, seeds, prompt_hashes = (held[rows] for held in self._held)
        scaled = logits / torch.where(temperature == 0.0, 1.0, temperature)[:, None]
        is_drawn = (temperature != 0.0).float()  # already divided by it
        limited = restrict_logits(scaled, top_k, top_p, min_p)
        return sample_tokens(limited, is_drawn, seeds, prompt_hashes, positions)
