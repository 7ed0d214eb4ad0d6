"""vLLM's hook for chat prompts: the renderer of the tokenizer mode ``deepinfer_v41``.

vLLM's own renderer of this model encodes the rendered text with the full vocabulary, so that text of a user which
spells a control token becomes that token. This one hands token ids to the engine, for every way into vLLM that takes
messages: ``/v1/chat/completions``, ``/v1/responses``, ``/v1/messages``, ``/tokenize``, ``LLM.chat``. A raw prompt
(``/v1/completions``, ``LLM.generate``, ``/tokenize`` with ``prompt``) is a rendered prompt by definition: control
tokens in it are meant as such, as in vLLM, and whoever puts text of others into one answers for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages, parse_chat_messages_async
from vllm.renderers.deepseek_v4 import DeepseekV41Renderer
from vllm.renderers.inputs.preprocess import parse_dec_only_prompt
from vllm.utils.async_utils import make_async

from deepinfer_plugin.encoding.conversation import IMAGE_PARTS, ImageParts, RenderOptions, build_conversation
from deepinfer_plugin.encoding.prompt import IMAGE_TOKEN, PromptEncoder
from deepinfer_plugin.errors import PromptError
from deepinfer_plugin.images.fetch import ImageConnector, ImageSource, Picture, source_of
from deepinfer_plugin.images.processing import MODALITY, ImageInfo

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.inputs import TokensPrompt
    from vllm.renderers.chat_utils import ChatCompletionMessageParam, ConversationMessage
    from vllm.renderers.inputs import DictPrompt
    from vllm.renderers.params import ChatParams


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A prompt with one placeholder per image, and the images in the order of the placeholders."""

    token_ids: list[int]
    images: list[ImageSource]


class DeepInferRenderer(DeepseekV41Renderer):
    """Renders messages to token ids; everything else is vLLM's."""

    def __init__(self, config: VllmConfig, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self._encoder = None if tokenizer is None else PromptEncoder(tokenizer.backend_tokenizer.to_str())
        self._encode_async = make_async(self._encode, executor=self._executor)

    def render_messages(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        """Parsed messages and the prompt as token ids.

        Raises:
            VLLMValidationError: the request cannot be rendered.
        """
        messages = materialised(messages)
        rendered = self._encode(messages, params)
        pictures: list[Picture] = []
        if rendered.images:
            with _as_bad_request():
                pictures = self._connector().load(rendered.images)
        conversation, _, _ = parse_chat_messages(without_images(messages), self.model_config, content_format="openai")
        return conversation, _prompt(rendered, pictures)

    async def render_messages_async(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        """The same in the renderer's threads.

        Raises:
            VLLMValidationError: the request cannot be rendered.
        """
        messages = materialised(messages)
        rendered = await self._encode_async(messages, params)
        pictures: list[Picture] = []
        if rendered.images:
            with _as_bad_request():
                pictures = await self._connector().load_async(rendered.images)
        conversation, _, _ = await parse_chat_messages_async(
            without_images(messages), self.model_config, content_format="openai"
        )
        return conversation, _prompt(rendered, pictures)

    def _process_tokens(self, prompt: TokensPrompt, **options: Any) -> Any:
        self._require_images(prompt)
        return super()._process_tokens(prompt, **options)

    async def _process_tokens_async(self, prompt: TokensPrompt, **options: Any) -> Any:
        self._require_images(prompt)
        return await super()._process_tokens_async(prompt, **options)

    def _require_images(self, prompt: TokensPrompt) -> None:
        """A raw text that spells the placeholder is a rendered prompt whose image is missing."""
        if self._encoder is None or prompt.get("multi_modal_data") or IMAGE_TOKEN not in (prompt.get("prompt") or ""):
            return
        if self._encoder.id_of(IMAGE_TOKEN) in prompt["prompt_token_ids"]:
            raise VLLMValidationError(
                f"image: the prompt spells the placeholder {IMAGE_TOKEN} and comes without an image, expected one "
                "image per placeholder; send images as parts of chat messages, whose text may spell anything"
            )

    def _image_info(self) -> ImageInfo | None:
        """What the model takes; None where the operator allows no image."""
        if self.mm_processor is None:
            return None
        info = self.mm_processor.info
        assert isinstance(info, ImageInfo)
        return info

    def _connector(self) -> ImageConnector:
        info = self._image_info()
        assert info is not None
        return ImageConnector(self.model_config, info.vision)

    def _encode(self, messages: list[ChatCompletionMessageParam], params: ChatParams) -> _Rendered:
        kwargs = params.get_apply_chat_template_kwargs()
        with _as_bad_request():
            if self._encoder is None:
                raise PromptError("chat: skip_tokenizer_init is set, expected a tokenizer; send token ids")
            if params.chat_template is not None:
                raise PromptError(
                    "chat: chat_template is set, expected none; this model's prompts are rendered by code, leave it out"
                )
            if params.media_io_kwargs or params.mm_processor_kwargs:
                raise PromptError(
                    "chat: media_io_kwargs or mm_processor_kwargs is set, expected neither: the checkpoint fixes how "
                    "images are processed; leave it out"
                )
            info = self._image_info()
            images = ImageParts(limit=0 if info is None else info.allowed_mm_limits[MODALITY])
            options = RenderOptions.from_template_kwargs(kwargs)
            conversation = build_conversation(
                messages,
                options,
                tools=kwargs.get("tools"),
                tool_choice=params.tool_choice,
                response_format=_as_json(params.response_format),
                images=images,
            )
            token_ids, order = self._encoder.encode_with_images(conversation, options.effort, images)
            sources = [source_of(part, where) for where, part in images.parts]
            return _Rendered(token_ids, [sources[index] for index in order])


@contextmanager
def _as_bad_request() -> Iterator[None]:
    """Our refusals as the error that vLLM's servers answer with status 400."""
    try:
        yield
    except PromptError as error:
        raise VLLMValidationError(str(error)) from error


def _prompt(rendered: _Rendered, pictures: list[Picture]) -> DictPrompt:
    prompt = parse_dec_only_prompt(rendered.token_ids)
    if pictures:
        prompt["multi_modal_data"] = {MODALITY: pictures}
    return prompt


def without_images(messages: list[Any]) -> list[Any]:
    """The messages with text in the place of images: vLLM's parser, which makes the echo, would load them."""

    def part(given: Any) -> Any:
        is_image = isinstance(given, dict) and given.get("type") in IMAGE_PARTS
        return {"type": "text", "text": IMAGE_TOKEN} if is_image else given

    return [
        {key: [part(each) for each in value] if isinstance(value, list) else value for key, value in message.items()}
        for message in messages
    ]


def materialised(messages: list[Any]) -> list[Any]:
    """The messages with lists in place of the iterators that pydantic leaves in them, which can be read once."""
    return [
        {key: list(value) if isinstance(value, Iterator) else value for key, value in message.items()}
        for message in messages
    ]


def _as_json(response_format: Any) -> dict[str, Any] | None:
    if response_format is None or isinstance(response_format, dict):
        return response_format
    dumped: dict[str, Any] = response_format.model_dump(by_alias=True)
    return dumped
