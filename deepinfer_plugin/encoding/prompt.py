"""From a chat request to token ids in which no text of the request is a control token.

deepseek-recipe renders the prompt and says which pieces of it are control tokens. Those become their ids by name. All
other text passes through the checkpoint's tokenizer without its added tokens, so that it cannot spell one of them,
alone or together with the text beside it. deepseek-recipe's own ``encode`` gives the same ids (the tests compare them);
it is not called because its conversations know the effort as a word only, while vLLM and the model take a number.

One difference is wanted: deepseek-recipe turns grounding tokens (ref, box, point, polygon) that are spelled in earlier
answers and reasoning back into tokens. Here they stay text in a conversation without images, in which the model has
nothing to point at, since whoever sends a conversation wrote its history too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from deepseek_recipe import Conversation, DeepseekV41Encoding, RenderedPrompt, SpecialToken, SpecialTokens
from tokenizers import Tokenizer

from deepinfer_plugin.encoding.conversation import DEFAULT_EFFORT, ImageParts
from deepinfer_plugin.errors import CheckpointError, PromptError

IMAGE_TOKEN = "<｜deepseek_image｜>"  # the checkpoint's spelling; deepseek-recipe's default is another one

GROUNDING_TOKENS = frozenset(
    kind.default_str()
    for kind in (
        SpecialToken.Ref,
        SpecialToken.RefEnd,
        SpecialToken.Box,
        SpecialToken.BoxEnd,
        SpecialToken.Point,
        SpecialToken.PointEnd,
        SpecialToken.Polygon,
        SpecialToken.PolygonEnd,
    )
)


class PromptEncoder:
    """Renders conversations for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str) -> None:
        """Prepare both ways of encoding.

        Args:
            tokenizer_json: content of the checkpoint's tokenizer.json.

        Raises:
            CheckpointError: the tokenizer is no BPE whose tokens all spell text.
        """
        content = json.loads(tokenizer_json)
        self._controls = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
        self._plain = Tokenizer.from_str(json.dumps(without_added_tokens(content), ensure_ascii=False))
        self._encoding = DeepseekV41Encoding().with_special_tokens(SpecialTokens(image=IMAGE_TOKEN))

    @property
    def added_ids(self) -> frozenset[int]:
        """Ids that no text can become."""
        return frozenset(self._controls.values())

    def id_of(self, control: str) -> int:
        """Id of a control token.

        Raises:
            PromptError: the tokenizer has no added token of that text.
        """
        if control not in self._controls:
            raise PromptError(f"chat: the tokenizer has no token {control!r}, expected it in tokenizer.json")
        return self._controls[control]

    def render(self, conversation: Conversation, effort: int = DEFAULT_EFFORT) -> list[tuple[str, bool]]:
        """The prompt in pieces: text, and whether the piece is a control token.

        Args:
            conversation: what to render.
            effort: 1 to 100, shown to the model in thinking mode.
        """
        return self._pieces(self._encoding.render_conversation(conversation), conversation, effort, None)

    def _pieces(
        self, rendered: RenderedPrompt, conversation: Conversation, effort: int, mark: str | None
    ) -> list[tuple[str, bool]]:
        pieces = list(_pieces(rendered, mark, frozenset() if mark is None else self._controls.keys()))
        if conversation.thinking_mode and effort != DEFAULT_EFFORT:
            # the text after <begin of sentence> and <System> opens with the effort, which is its first number
            text = pieces[2][0]
            changed = re.sub(r"\d+", str(effort), text, count=1)
            assert changed != text, f"the system slot opens with {text[:40]!r}"
            pieces[2] = (changed, False)
        return pieces

    def encode(self, conversation: Conversation, effort: int = DEFAULT_EFFORT) -> list[int]:
        """Token ids of the prompt.

        Raises:
            PromptError: the tokenizer lacks a control token that the prompt needs.
        """
        return self.encode_pieces(self.render(conversation, effort))

    def encode_with_images(
        self, conversation: Conversation, effort: int, images: ImageParts
    ) -> tuple[list[int], list[int]]:
        """Token ids of a prompt in which one placeholder stands for each image.

        Args:
            conversation: made with ``images``.
            effort: 1 to 100, shown to the model in thinking mode.
            images: its image parts.

        Returns:
            The ids, and which part each placeholder stands for: tool results come in the order of their calls.

        Raises:
            PromptError: the tokenizer lacks a control token that the prompt needs.
        """
        rendered = self._encoding.render_conversation(conversation)
        order = [int(source.path) for source in rendered.image_sources]
        return self.encode_pieces(self._pieces(rendered, conversation, effort, images.mark if order else None)), order

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        """Token ids of a prompt in pieces, see ``render``.

        Raises:
            PromptError: the tokenizer lacks one of the control tokens.
        """
        ids: list[int] = []
        for text, is_control in pieces:
            ids += [self.id_of(text)] if is_control else self._plain.encode(text, add_special_tokens=False).ids
        return ids


def _pieces(rendered: RenderedPrompt, mark: str | None, controls: AbstractSet[str]) -> Iterator[tuple[str, bool]]:
    """Pieces of a prompt; ``mark`` stands for an image. Grounding tokens that are not in ``controls`` are text."""
    prompt, end = rendered.prompt, 0
    for start, stop in rendered.special_ranges:
        spelled = prompt[start:stop]
        if spelled in GROUNDING_TOKENS and spelled not in controls:
            continue  # part of the text around it
        if start > end:
            yield prompt[end:start], False
        yield IMAGE_TOKEN if spelled == mark else spelled, True
        end = stop
    if end < len(prompt):
        yield prompt[end:], False


def without_added_tokens(content: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer that has no added token and cannot make one from text.

    An added token may be in the model's vocabulary as well. It is taken out there, with the merges that make or use it:
    a text that spells it then ends in the tokens it would have been merged from.

    Args:
        content: tokenizer.json, parsed; not changed.

    Raises:
        CheckpointError: the model is no BPE, or maps unknown text to a token.
    """
    model = content["model"]
    kind = model.get("type")
    if kind != "BPE" or model.get("unk_token") is not None:
        raise CheckpointError(
            f"tokenizer: model is {kind} with the unknown token {model.get('unk_token')!r}, expected BPE without one; "
            "use the tokenizer.json of the checkpoint"
        )
    added = {token["content"] for token in content["added_tokens"]}
    merges = [merge for merge in model["merges"] if not _touches(merge, added)]
    vocab = {token: index for token, index in model["vocab"].items() if token not in added}
    plain_model = {**model, "vocab": vocab, "merges": merges}
    return {
        **content,
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "model": plain_model,
    }


def _touches(merge: str | Sequence[str], added: set[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return not added.isdisjoint((left, right, left + right))
