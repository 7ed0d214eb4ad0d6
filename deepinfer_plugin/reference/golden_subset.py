"""Make the part of the golden data that travels with the repository.

    python -m deepinfer_plugin.reference.golden_subset --golden DIR [--out DIR]

``DIR`` is the full folder. The files keep their names and their keys, with fewer sequences and fewer rows, so that the
same tests read either; ``<sequence>.rows`` says which rows of a prefill sequence were kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save

MODES = ("ref", "q32", "s32")
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "golden"
NUM_ROBUST_ROWS = 36  # every second one of 72
RANDOM_PROMPTS = ("rand17", "rand33", "rand64", "rand130")
DECODE_ROWS = {"tiny-s0": {"P17": 13}, "nano-s0": {"P17": 13, "P33": 13}}  # the prompt's last row and 12 steps
NUM_BLOCK_ROWS = 20  # first rows of layers_ref
DRAFT_STRIDE = 3  # every third entry of the drafts
BLOCK_KEYS = ("x_in", "x_out", "pre_in", "pre_out", "comp_idx")
KERNEL_FILES = ("kernels/vectors_a.safetensors", "kernels/token_normalisation.json")

Tensors = dict[str, torch.Tensor]


def prefill_subset(full: Tensors) -> Tensors:
    """Every second row of ``robust0``, a few random prompts, and the ids that the layer files begin with."""
    kept: Tensors = {"seq0.tokens": full["seq0.tokens"]}
    for name in ("robust0", *RANDOM_PROMPTS):
        tokens = full[f"{name}.tokens"]
        num_rows = full[f"{name}.logits.s32"].shape[0]
        first = tokens.shape[0] - num_rows
        stride = max(num_rows // NUM_ROBUST_ROWS, 1)
        chosen = torch.arange(stride - 1, num_rows, stride)
        kept[f"{name}.tokens"] = tokens
        kept[f"{name}.rows"] = (chosen + first).int()
        for mode in MODES:
            kept[f"{name}.logits.{mode}"] = full[f"{name}.logits.{mode}"][chosen]
            kept[f"{name}.stable.{mode}"] = full[f"{name}.stable.{mode}"][chosen]
    return kept


def decode_subset(full: Tensors, rows_of: dict[str, int]) -> Tensors:
    """The first rows of a few greedy continuations."""
    kept: Tensors = {}
    for name, num_rows in rows_of.items():
        kept[f"{name}.prompt"] = full[f"{name}.prompt"]
        for mode in MODES:
            for key in ("tokens", "logits", "gap", "stable"):
                kept[f"{name}.{key}.{mode}"] = full[f"{name}.{key}.{mode}"][:num_rows]
    return kept


def layers_subset(full: Tensors) -> Tensors:
    """Inputs and outputs of every block on the first rows of the prefill; no later row acts on them."""
    kept: Tensors = {"tokens": full["tokens"][:NUM_BLOCK_ROWS]}
    for key, value in full.items():
        layer, _, name = key.partition(".")
        if (layer.startswith("L") and name in BLOCK_KEYS) or layer == "engram_rows":
            kept[key] = value[:NUM_BLOCK_ROWS]
    return kept


def drafts_subset(full: Tensors) -> Tensors:
    """Some of the drafts behind the one sequence of the file."""
    return {key: value if key == "tokens" else value[::DRAFT_STRIDE] for key, value in full.items()}


def write_subset(golden: Path, out: Path) -> None:
    """Write the subset of the folder ``golden`` and its manifest to ``out``."""
    files: dict[str, bytes] = {}
    for folder, rows_of in DECODE_ROWS.items():
        files[f"{folder}/prefill.safetensors"] = _cut(
            prefill_subset(load_file(golden / folder / "prefill.safetensors"))
        )
        files[f"{folder}/decode.safetensors"] = _cut(
            decode_subset(load_file(golden / folder / "decode.safetensors"), rows_of)
        )
    layers = "nano-s0/layers_ref.safetensors"
    files[layers] = _cut(layers_subset(load_file(golden / layers)))
    drafts = "nano-s0/dspark.safetensors"
    files[drafts] = _cut(drafts_subset(load_file(golden / drafts)))
    for relative in KERNEL_FILES:
        files[relative] = (golden / relative).read_bytes()
    for relative, content in files.items():
        (out / relative).parent.mkdir(parents=True, exist_ok=True)
        (out / relative).write_bytes(content)
    (out / "manifest.json").write_text(json.dumps(_manifest(golden, files), indent=1) + "\n", encoding="utf-8")


def _cut(tensors: Tensors) -> bytes:
    content: bytes = save({key: value.contiguous() for key, value in sorted(tensors.items())})
    return content


def _manifest(golden: Path, files: dict[str, bytes]) -> dict[str, object]:
    """What the folder is, and which file of the full folder each of its files was cut from."""
    full = json.loads((golden / "manifest.json").read_text(encoding="utf-8"))
    sha256_of = {entry["path"]: entry["sha256"] for entry in full["files"]}
    return {
        "about": "Part of the golden data of the small checkpoints, made by deepinfer_plugin.reference.golden_subset",
        "format": full["format"],
        "checkpoints": full["checkpoints"],  # all of them: test_tiny.py compares the content hashes
        "files": [
            {
                "path": relative,
                "bytes": len(files[relative]),
                "sha256": hashlib.sha256(files[relative]).hexdigest(),
                "sha256_of_full_file": sha256_of[relative],
            }
            for relative in sorted(files)
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the golden subset that travels with the repository.")
    parser.add_argument("--golden", type=Path, required=True, help="the full golden folder")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write, default: in the package")
    parsed = parser.parse_args(arguments)
    write_subset(parsed.golden, parsed.out)


if __name__ == "__main__":
    main()
