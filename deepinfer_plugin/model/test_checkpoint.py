"""Checkpoints on disk: what is accepted, and what each refusal says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_plugin.errors import CheckpointError, ConfigError
from deepinfer_plugin.model.config import ModelConfig
from deepinfer_plugin.model.shards import INDEX_FILE, SINGLE_FILE
from deepinfer_plugin.model.weights import check_checkpoint, check_tokenizer, iterate_tensors

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM = "norm.weight"


def edit_shard(file: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def edit_index(folder: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    file = folder / INDEX_FILE
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content["weight_map"])
    file.write_text(json.dumps(content), encoding="utf-8")


def put(tensors: dict[str, torch.Tensor], name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors[name] = change(tensors[name]).contiguous()


@pytest.mark.parametrize(("name", "seed"), [("tiny", 0), ("nano", 1)])
def test_good_checkpoints_pass(name: str, seed: int, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(name, seed)
    config = ModelConfig.from_model_dir(folder)
    check_checkpoint(folder, config)
    check_tokenizer(folder, config)


def write_single_file(folder: Path, tensors: dict[str, torch.Tensor], prefix: str = "") -> None:
    for file in (FIRST, SECOND, INDEX_FILE):
        (folder / file).unlink()
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / SINGLE_FILE)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_single_file_without_index_is_read(
    prefix: str, nano_folder: Path, nano_config: ModelConfig, nano_tensors: dict[str, torch.Tensor]
) -> None:
    write_single_file(nano_folder, nano_tensors, prefix)
    assert sorted(name for name, _ in iterate_tensors(nano_folder, nano_config)) == sorted(nano_tensors)


def test_names_with_the_prefix_model_are_accepted_in_shards_and_index(
    nano_folder: Path, nano_config: ModelConfig
) -> None:
    for file in (FIRST, SECOND):
        content = load_file(nano_folder / file)
        save_file({f"model.{name}": tensor for name, tensor in content.items()}, nano_folder / file)
    edit_index(nano_folder, lambda names: [names.update({f"model.{name}": names.pop(name)}) for name in list(names)])
    check_checkpoint(nano_folder, nano_config)


# Bad checkpoints: (what happens to the folder, what the message must contain).


def truncate(file_name: str, keep: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / file_name).read_bytes()
        (folder / file_name).write_bytes(data[: keep(len(data))])

    return damage


def in_shard(edit: Callable[[dict[str, torch.Tensor]], Any], file_name: str = SECOND) -> Callable[[Path], None]:
    return lambda folder: edit_shard(folder / file_name, edit)


def in_index(edit: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_index(folder, edit)


def in_both(
    edit_tensors: Callable[[dict[str, torch.Tensor]], Any], edit_names: Callable[[dict[str, str]], Any]
) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        edit_shard(folder / SECOND, edit_tensors)
        edit_index(folder, edit_names)

    return damage


def corrupt_header(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Replace text of the same length in the header of the second shard."""
    assert len(old) == len(new)

    def damage(folder: Path) -> None:
        file = folder / SECOND
        data = file.read_bytes()
        assert old in data
        file.write_bytes(data.replace(old, new, 1))

    return damage


def write_index(content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / INDEX_FILE).write_bytes(content)

    return damage


BAD: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "shard cut in the data": (
        truncate(SECOND, lambda size: size - 10),
        [SECOND, "is truncated at", "in tensor", "expected", "download the file again"],
    ),
    "shard cut in the header": (truncate(FIRST, lambda size: 1000), [FIRST, "is 1000 bytes long", "truncated"]),
    "shard cut in the length": (truncate(FIRST, lambda size: 5), [FIRST, "is 5 bytes long", "truncated"]),
    "empty shard": (truncate(FIRST, lambda size: 0), [FIRST, "is 0 bytes long", "truncated"]),
    "shard with bytes left over": (
        lambda folder: (folder / SECOND).open("ab").write(b"\0" * 7),
        [SECOND, "bytes long, expected"],
    ),
    "shard of another format": (
        lambda folder: (folder / SECOND).write_bytes(b"PK\3\4" + b"\xff" * 100),
        [SECOND, "of another format"],
    ),
    "header is no JSON": (corrupt_header(b'"dtype":', b'"dtype" '), [SECOND, "is damaged", "safetensors format"]),
    "header lacks a dtype": (corrupt_header(b'"dtype":', b'"dtypo":'), [SECOND, "is damaged", "dtype"]),
    "shape without its data": (
        corrupt_header(b'"shape":[64,64]', b'"shape":[64,32]'),
        [SECOND, "is damaged", "BF16 [64, 32]", "has 8192 bytes"],
    ),
    "tensor missing from shard": (in_shard(lambda t: t.pop(NORM)), [f"tensor {NORM} is missing from", SECOND]),
    "tensor missing everywhere": (
        in_both(lambda t: t.pop(NORM), lambda names: names.pop(NORM)),
        [f"tensor {NORM} is missing from", INDEX_FILE, "expected BF16 [64]"],
    ),
    "several tensors missing": (
        in_both(
            lambda t: [t.pop(name) for name in [*t] if ".experts.3." in name],
            lambda names: [names.pop(name) for name in [*names] if ".experts.3." in name and names[name] == SECOND],
        ),
        ["layers.3.ffn.experts.3.w1.scale (and ", " more) is missing from", "expected F8_E8M0 [32, 2]"],
    ),
    "scale missing": (
        in_both(lambda t: t.pop("layers.4.attn.wkv.scale"), lambda names: names.pop("layers.4.attn.wkv.scale")),
        ["tensor layers.4.attn.wkv.scale is missing from", "expected F8_E8M0 [1, 2]"],
    ),
    "extra tensor": (
        in_both(
            lambda t: t.update({"layers.3.attn.extra.weight": torch.zeros(4)}),
            lambda names: names.update({"layers.3.attn.extra.weight": SECOND}),
        ),
        ["tensor layers.3.attn.extra.weight in", SECOND, "is not part of the model"],
    ),
    "compressor where there is no KV source": (
        in_both(
            lambda t: t.update({"layers.5.attn.compressor.norm.weight": torch.zeros(32, dtype=torch.bfloat16)}),
            lambda names: names.update({"layers.5.attn.compressor.norm.weight": SECOND}),
        ),
        ["tensor layers.5.attn.compressor.norm.weight in", "is not part of the model"],
    ),
    "tensor not in the index": (
        in_index(lambda names: names.pop(NORM)),
        [f"tensor {NORM} in", SECOND, "not listed in"],
    ),
    "tensor in another shard than listed": (
        in_index(lambda names: names.update({NORM: FIRST})),
        [f"tensor {NORM} is in", SECOND, f"expected it in {FIRST}", INDEX_FILE],
    ),
    "tensor in two shards": (
        in_shard(lambda t: t.update({NORM: torch.zeros(64, dtype=torch.bfloat16)}), FIRST),
        [f"tensor {NORM} is in", FIRST, f"expected it in {SECOND}"],
    ),
    "tensor twice under two names": (
        in_shard(lambda t: t.update({f"model.{NORM}": t[NORM].clone()})),
        [SECOND, f"{NORM} is listed twice"],
    ),
    "wrong shape": (
        in_shard(lambda t: put(t, NORM, lambda x: x[:32])),
        [f"tensor {NORM} in", SECOND, "is BF16 [32], expected BF16 [64]"],
    ),
    "transposed weight": (
        in_shard(
            lambda t: put(t, "layers.3.attn.wq_b.weight", lambda x: x.view(torch.uint8).T.contiguous().view(x.dtype))
        ),
        ["tensor layers.3.attn.wq_b.weight in", "is F8_E4M3 [32, 128], expected F8_E4M3 [128, 32]"],
    ),
    "wrong dtype": (
        in_shard(lambda t: put(t, NORM, lambda x: x.float())),
        [f"tensor {NORM} in", "is F32 [64], expected BF16 [64]"],
    ),
    "foreign dtype": (
        in_shard(lambda t: put(t, NORM, lambda x: x.half())),
        [f"tensor {NORM} in", "is F16 [64], expected BF16 [64]"],
    ),
    "unknown quantisation: scales in fp32": (
        in_shard(lambda t: put(t, "layers.3.attn.wkv.scale", lambda x: x.float())),
        ["tensor layers.3.attn.wkv.scale in", "is F32 [1, 2], expected F8_E8M0 [1, 2]"],
    ),
    "unknown quantisation: experts in fp8": (
        in_shard(
            lambda t: put(t, "layers.3.ffn.experts.0.w1.weight", lambda x: torch.zeros(32, 64).to(torch.float8_e4m3fn))
        ),
        ["tensor layers.3.ffn.experts.0.w1.weight in", "is F8_E4M3 [32, 64], expected I8 [32, 32]"],
    ),
    "missing shard": (lambda folder: (folder / FIRST).unlink(), [INDEX_FILE, f"names the file {FIRST}", "is missing"]),
    "index points to a missing file": (
        in_index(lambda names: names.update({NORM: "model-00003-of-00002.safetensors"})),
        [INDEX_FILE, "model-00003-of-00002.safetensors", f"for tensor {NORM}", "is missing"],
    ),
    "index points out of the folder": (
        in_index(lambda names: names.update({NORM: f"../{SECOND}"})),
        [INDEX_FILE, f"maps tensor {NORM} to '../{SECOND}'", "beside the index"],
    ),
    "index is no JSON": (write_index(b"{"), [INDEX_FILE, "is damaged"]),
    "index without a map": (write_index(b'{"metadata": {}}'), [INDEX_FILE, "is without weight_map"]),
    "index lists a tensor twice": (
        write_index(f'{{"weight_map": {{"{NORM}": "{FIRST}", "{NORM}": "{SECOND}"}}}}'.encode()),
        [INDEX_FILE, f"{NORM} is listed twice"],
    ),
    "neither index nor single file": (
        lambda folder: (folder / INDEX_FILE).unlink(),
        [f"is without {INDEX_FILE} and {SINGLE_FILE}"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_checkpoint_ends_in_one_error_before_any_tensor_is_read(
    case: str, nano_folder: Path, nano_config: ModelConfig
) -> None:
    damage, parts = BAD[case]
    damage(nano_folder)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(nano_folder, nano_config)
    message = str(caught.value)
    assert message.startswith("check_checkpoint: ")
    assert "expected" in message
    assert "; " in message, "the message does not say what to do"
    for part in parts:
        assert part in message
    with pytest.raises(CheckpointError, match=re.escape(message)):
        next(iterate_tensors(nano_folder, nano_config))


def test_a_config_of_another_model_is_told_by_the_first_tensor_that_differs(
    checkpoint: Callable[..., Path], nano_config: ModelConfig
) -> None:
    with pytest.raises(CheckpointError, match=r"embed.weight in .* is BF16 \[256, 64\], expected BF16 \[512, 64\]"):
        check_checkpoint(checkpoint("nano", 0), replace(nano_config, vocab_size=512))


def test_an_empty_single_file_lacks_every_tensor(nano_folder: Path, nano_config: ModelConfig) -> None:
    write_single_file(nano_folder, {})
    with pytest.raises(CheckpointError, match=rf"\(and 711 more\) is missing from .*{SINGLE_FILE}"):
        check_checkpoint(nano_folder, nano_config)


def test_engram_tables_must_have_the_rows_that_the_hash_addresses(
    checkpoint: Callable[..., Path], nano_config: ModelConfig
) -> None:
    with pytest.raises(ConfigError, match=r"engram_num_embeddings is \[462, 631\], expected \[462, 630\]"):
        check_checkpoint(checkpoint("nano", 0), replace(nano_config, engram_num_embeddings=(462, 631)))


def test_a_shard_cut_while_it_is_read_is_named(nano_folder: Path, nano_config: ModelConfig) -> None:
    tensors = iterate_tensors(nano_folder, nano_config)
    next(tensors)
    truncate(SECOND, lambda size: size // 2)(nano_folder)
    with pytest.raises(CheckpointError, match=rf"{SECOND} ends .* before the end of tensor"):
        list(tensors)


def rename(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"][-1]["id"] = 256
    tokenizer["model"]["vocab"]["<｜reserved｜>"] = 256


TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "a token too few": (
        lambda tokenizer: tokenizer["model"]["vocab"].pop("a"),
        ["vocabulary of 255 tokens", "has no token", "vocab_size 256"],
    ),
    "a token too many": (
        lambda tokenizer: tokenizer["added_tokens"].append({"id": 256, "content": "x"}),
        ["vocabulary of 257 tokens", "id 256 is beyond the embedding", "vocab_size 256"],
    ),
    "an id beyond": (rename, ["vocabulary of 256 tokens", "id 256 is beyond the embedding"]),
    "no vocabulary": (lambda tokenizer: tokenizer.pop("model"), ["is unreadable", "KeyError"]),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_vocabulary_that_does_not_match_the_model_is_refused(
    case: str, nano_folder: Path, nano_config: ModelConfig
) -> None:
    edit, parts = TOKENIZERS[case]
    file = nano_folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    edit(tokenizer)
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        check_tokenizer(nano_folder, nano_config)
    for part in (str(file), "expected", "use the tokenizer.json of the checkpoint", *parts):
        assert part in str(caught.value)


def test_a_missing_tokenizer_is_named(nano_folder: Path, nano_config: ModelConfig) -> None:
    (nano_folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json is unreadable \(FileNotFoundError"):
        check_tokenizer(nano_folder, nano_config)


# Loading.
