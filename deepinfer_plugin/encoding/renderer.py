"""vLLM's hook for chat prompts: the renderer of the tokenizer mode ``deepinfer_v41``.

vLLM's own renderer of this model encodes the rendered text with the full vocabulary, so that text of a user which
spells a control token becomes that token. This one hands token ids to the engine, for every way into vLLM that takes
messages: ``/v1/chat/completions``, ``/v1/responses``, ``/v1/messages``, ``/tokenize``, ``LLM.chat``. A raw prompt
(``/v1/completions``, ``LLM.generate``, ``/tokenize`` with ``prompt``) is a rendered prompt by definition: control
tokens in it are meant as such, as in vLLM, and whoever puts text of others into one answers for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.renderers.chat_utils import parse_chat_messages, parse_chat_messages_async
from vllm.renderers.deepseek_v4 import DeepseekV41Renderer
from vllm.renderers.inputs.preprocess import parse_dec_only_prompt
from vllm.utils.async_utils import make_async

from deepinfer_plugin.encoding.conversation import RenderOptions, build_conversation
from deepinfer_plugin.encoding.prompt import PromptEncoder
from deepinfer_plugin.errors import PromptError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.renderers.chat_utils import ChatCompletionMessageParam, ConversationMessage
    from vllm.renderers.inputs import DictPrompt
    from vllm.renderers.params import ChatParams


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
        prompt = parse_dec_only_prompt(self._encode(messages, params))
        conversation, _, _ = parse_chat_messages(messages, self.model_config, content_format="openai")
        return conversation, prompt

    async def render_messages_async(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        """The same in the renderer's threads.

        Raises:
            VLLMValidationError: the request cannot be rendered.
        """
        messages = materialised(messages)
        prompt = parse_dec_only_prompt(await self._encode_async(messages, params))
        conversation, _, _ = await parse_chat_messages_async(messages, self.model_config, content_format="openai")
        return conversation, prompt

    def _encode(self, messages: list[ChatCompletionMessageParam], params: ChatParams) -> list[int]:
        kwargs = params.get_apply_chat_template_kwargs()
        try:
            if self._encoder is None:
                raise PromptError("chat: skip_tokenizer_init is set, expected a tokenizer; send token ids")
            if params.chat_template is not None:
                raise PromptError(
                    "chat: chat_template is set, expected none; this model's prompts are rendered by code, leave it out"
                )
            options = RenderOptions.from_template_kwargs(kwargs)
            conversation = build_conversation(
                messages,
                options,
                tools=kwargs.get("tools"),
                tool_choice=params.tool_choice,
                response_format=_as_json(params.response_format),
            )
            return self._encoder.encode(conversation, options.effort)
        except PromptError as error:
            raise VLLMValidationError(str(error)) from error


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
