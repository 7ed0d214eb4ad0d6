"""config.json of the released model, as far as it is public: to check shapes and sizes without the checkpoint."""

from __future__ import annotations

from typing import Any

from deepinfer_plugin.reference.released_text import RELEASED_TEXT
from deepinfer_plugin.reference.tiny_config import config_dict

_VISION: dict[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
}


def released_config_dict() -> dict[str, Any]:
    """The nested form on disk; what it does not name is as in ``tiny``."""
    config_json = config_dict("tiny")
    config_json["image_token_id"] = 129264
    config_json["text_config"].update(RELEASED_TEXT)
    config_json["vision_config"].update(_VISION)
    return config_json
