"""Run generated image files through decoding and preprocessing: ``python -m deepinfer_plugin.images --files 2000``."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections import Counter

from deepinfer_plugin.errors import PromptError
from deepinfer_plugin.images.corpus import CorpusFile, corpus
from deepinfer_plugin.images.decode import ImageIO
from deepinfer_plugin.images.preprocess import picture_hash, to_patches
from deepinfer_plugin.model.config import VisionConfig

RELEASED = VisionConfig(
    num_hidden_layers=32,
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=2816,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=1024,
    min_pixels=295936,
    max_wh_ratio=None,
)
MAX_GROWTH_MIB = 512
_KIB_OF_MIB = 1024


def outcome(file: CorpusFile, config: VisionConfig = RELEASED) -> str:
    """``served`` or ``refused``.

    Raises:
        AssertionError: a valid file is refused, or one that must be refused is served.
    """
    reader = ImageIO()
    reader.config = config
    try:
        picture = reader.load_bytes(file.data).media
        patches, layout = to_patches(picture, config)
        picture_hash(picture)
    except PromptError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert file.is_valid is not bool(refusal), (file.kind, refusal)
    if refusal:
        return "refused"
    assert patches.shape == (layout.num_patches, 3 * config.patch_size**2)
    assert layout.num_tokens <= config.max_image_tokens
    return "served"


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // _KIB_OF_MIB


def main(arguments: list[str]) -> int:
    """Print what happened by kind; 1 if memory grew beyond its bound."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer_plugin.images", description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    if given.files < 1:
        parser.error(f"--files is {given.files}, expected at least 1")
    before, start_s = _peak_mib(), time.monotonic()
    counts: Counter[tuple[str, str]] = Counter()
    for file in corpus(given.seed, given.files):
        counts[file.kind, outcome(file)] += 1
    for (kind, result), count in sorted(counts.items()):
        print(f"{kind:<14} {result:<8} {count}")
    growth = _peak_mib() - before
    print(f"{given.files} files, {time.monotonic() - start_s:.0f} s, peak memory {before} + {growth} MiB")
    return 0 if growth <= MAX_GROWTH_MIB else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
