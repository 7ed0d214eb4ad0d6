"""What a step's plan becomes on the device: index tensors for the model's forward pass."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderPassInputs:
    """Rows that the encoder layers compute together, see ``plan.EncoderPass``.

    Attributes:
        input_ids: [num_rows] token ids.
        lookback_ids: [num_rows, depth] int64 ids before each token, nearest first, -1 before the request.
        positions: [num_rows] int64.
        req_idx: [num_rows] int32, request of the step.
        floors: [num_rows] int64 first window key that the row may see.
        source_rows: [num_rows] int64 row of the step, -1 for a replayed row.
        own_rows: [num_own] int64 rows of this pass that are rows of the step.
        step_rows: [num_own] int64 which rows of the step they are.
        inputs_embeds: [num_rows, hidden_size] with the rows of images; None: all rows are the embeddings of their ids.
        is_image: [num_rows] bool, rows inside an image span; None: no row.
    """

    input_ids: torch.Tensor
    lookback_ids: torch.Tensor
    positions: torch.Tensor
    req_idx: torch.Tensor
    floors: torch.Tensor
    source_rows: torch.Tensor
    own_rows: torch.Tensor
    step_rows: torch.Tensor
    inputs_embeds: torch.Tensor | None = None
    is_image: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayInputs:
    """Bounded replay of one step.

    Attributes:
        decoder_floors: [max_num_reqs] int64 by request of the step: first window key that its rows may see in a
            decoder layer. One buffer for the life of the process, so that a CUDA graph can read it.
        decoder_rows: [num_kept] int64 ascending rows that pass the decoder layers; None: all.
        encoder_passes: empty: all rows in one pass without a floor.
    """

    decoder_floors: torch.Tensor
    decoder_rows: torch.Tensor | None = None
    encoder_passes: tuple[EncoderPassInputs, ...] = ()
