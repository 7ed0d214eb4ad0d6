"""Messages, tools and options of a chat request as a conversation of deepseek-recipe, which renders the prompt.

deepseek-recipe converts whole requests of the official API too, but refuses what vLLM accepts: another model name, an
effort as a number, the developer role, ``reasoning`` beside ``reasoning_content``. So the messages are converted here.
Text stays text: nothing in a message is searched for control tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from deepseek_recipe import (
    AssistantMessage,
    BytesImageSource,
    Conversation,
    LatestReminderMessage,
    Message,
    SystemMessage,
    ToolCall,
    ToolDefinition,
    ToolMessage,
    UserMessage,
)

from deepinfer_plugin.errors import PromptError

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image", "image_pil", "image_embeds")
# The words of the official API and the effort that each stands for; ``none`` switches thinking off.
EFFORT_WORDS = {"minimal": 50, "low": 50, "medium": 75, "high": 75, "xhigh": 75, "ultra": 100, "max": 100}
DEFAULT_EFFORT = EFFORT_WORDS["high"]
_REMEDY = "; correct the request"


@dataclass(slots=True)
class ImageParts:
    """The image parts of a conversation, in the order of the messages.

    Attributes:
        limit: how many a request may hold.
        mark: stands for an image in the text that goes to deepseek-recipe; it cannot be guessed, so no text holds it.
        parts: where each stands, and the part.
    """

    limit: int
    mark: str = field(default_factory=lambda: f"[image {secrets.token_hex(16)}]")
    parts: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)

    def add(self, part: Mapping[str, Any], where: str) -> str:
        """Keep a part; returns the text that stands for it.

        Raises:
            PromptError: it is one too many.
        """
        if len(self.parts) == self.limit:
            found = "no image" if self.limit == 0 else f"at most {self.limit} images"
            raise PromptError(
                f"chat: {where} is an image, expected {found} in a request; the operator sets --limit-mm-per-prompt"
            )
        self.parts.append((where, part))
        return self.mark

    def sources(self, first: int) -> list[BytesImageSource]:
        """Stand-ins, from number ``first`` on, by which the rendered prompt tells the order of its images."""
        return [BytesImageSource(b"", path=str(index)) for index in range(first, len(self.parts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """What a request says about its prompt beside messages and tools."""

    thinking: bool = True
    effort: int = DEFAULT_EFFORT  # 1 to 100; rendered in thinking mode only
    continue_final_message: bool = False

    @classmethod
    def from_template_kwargs(cls, kwargs: Mapping[str, Any]) -> RenderOptions:
        """Read vLLM's chat template arguments.

        Args:
            kwargs: ``thinking`` or ``enable_thinking`` (either one switches it on; on by default), ``reasoning_effort``
                (a word or 1 to 100), ``drop_thinking``, ``add_generation_prompt``, ``continue_final_message``. Others
                are for other models' templates and are left alone, as in vLLM.

        Raises:
            PromptError: an argument has a value that the released format does not know.
        """
        switches = [kwargs[name] for name in ("thinking", "enable_thinking") if name in kwargs]
        effort = kwargs.get("reasoning_effort")
        if kwargs.get("drop_thinking", True) is not True:
            raise PromptError(
                f"chat template: drop_thinking is {kwargs['drop_thinking']!r}, expected true; the released format "
                "keeps earlier reasoning exactly where tools are declared"
            )
        continues = bool(kwargs.get("continue_final_message", False))
        if not continues and not kwargs.get("add_generation_prompt", True):
            raise PromptError(
                "chat template: add_generation_prompt is false, expected true, or continue_final_message; the released "
                "format ends every prompt with the turn of the assistant"
            )
        return cls(
            thinking=effort != "none" and (not switches or any(map(bool, switches))),
            effort=DEFAULT_EFFORT if effort in (None, "none") else parse_effort(effort),
            continue_final_message=continues,
        )


def parse_effort(effort: object) -> int:
    """The number that an effort stands for, 1 to 100.

    Raises:
        PromptError: neither a word of ``EFFORT_WORDS`` nor an integer from 1 to 100.
    """
    if isinstance(effort, str) and effort in EFFORT_WORDS:
        return EFFORT_WORDS[effort]
    if type(effort) is int and 1 <= effort <= 100:
        return effort
    raise PromptError(
        f"chat template: reasoning_effort is {effort!r}, expected none, {', '.join(EFFORT_WORDS)} or an integer from "
        "1 to 100 (a number goes into chat_template_kwargs)"
    )


def build_conversation(
    messages: Sequence[Mapping[str, Any]],
    options: RenderOptions,
    *,
    tools: Iterable[Mapping[str, Any]] | None = None,
    tool_choice: object = None,
    response_format: Mapping[str, Any] | None = None,
    images: ImageParts | None = None,
) -> Conversation:
    """Convert a chat request.

    Args:
        messages: OpenAI messages; ``reasoning`` and ``reasoning_content`` are the same field.
        options: how to render them; the effort is not part of a conversation.
        tools: function tools, OpenAI form.
        tool_choice: ``none`` hides the tools. A forced call is forced by vLLM's grammar, not by the prompt.
        response_format: OpenAI form; ``json_object`` and ``json_schema`` are shown to the model.
        images: takes the image parts; None: text only.

    Raises:
        PromptError: a message or tool is malformed, or holds an image that has no place; the text names it.
    """
    images = ImageParts(limit=0) if images is None else images
    if not messages:
        raise PromptError(f"chat: messages is empty, expected at least one{_REMEDY}")
    last = len(messages) - 1
    if options.continue_final_message and messages[last].get("role") != "assistant":
        raise PromptError(
            f"chat: continue_final_message is true and the last message has the role {messages[last].get('role')!r}, "
            f"expected assistant{_REMEDY}"
        )
    schema: dict[str, Any] = {}
    kind = (response_format or {}).get("type")
    if kind == "json_object":
        schema = {"response_format": "json_object"}
    elif kind == "json_schema":
        schema = {"response_schema": _schema_of(response_format or {})}
    try:
        return Conversation(
            [
                _message(m, f"messages[{i}]", options.continue_final_message and i == last, images)
                for i, m in enumerate(messages)
            ],
            thinking_mode=options.thinking,
            tools=_tools(tools, "tools"),
            tool_choice="none" if tool_choice == "none" else "auto",
            **schema,
        )
    except UnicodeEncodeError as error:
        found = hex(ord(error.object[error.start]))
        raise PromptError(f"chat: a text holds the lone surrogate {found}, expected Unicode text{_REMEDY}") from None


def _schema_of(response_format: Mapping[str, Any]) -> Any:
    described = response_format.get("json_schema")
    return described.get("schema") if isinstance(described, Mapping) else None


def _message(message: Mapping[str, Any], where: str, is_continued: bool, images: ImageParts) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise PromptError(f"chat: {where}.role is {role!r}, expected one of {', '.join(ROLES)}{_REMEDY}")
    takes_images = role not in ("assistant", "latest_reminder")
    first = len(images.parts)
    text = _text(message.get("content"), f"{where}.content", images if takes_images else None)
    held: dict[str, Any] = {"image_sources": images.sources(first), "image_token": images.mark}
    if role in ("system", "developer"):
        return SystemMessage(text, tools=_tools(message.get("tools"), f"{where}.tools"), **held)
    if role == "user":
        return UserMessage(text, **held)
    if role == "tool":
        return ToolMessage(text, _string_or_none(message.get("tool_call_id"), f"{where}.tool_call_id"), **held)
    if role == "latest_reminder":
        return LatestReminderMessage(text)
    reasoning = message.get("reasoning_content")
    reasoning = message.get("reasoning") if reasoning is None else reasoning
    calls = message.get("tool_calls")
    return AssistantMessage(
        text,
        None if reasoning is None else _text(reasoning, f"{where}.reasoning"),
        [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(_list(calls, f"{where}.tool_calls"))]
        or None,
        prefix=is_continued or message.get("prefix") is True,
    )


def _text(content: object, where: str, images: ImageParts | None = None) -> str:
    """A string, or the texts of parts joined by an empty line as the released format has it; images become marks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n\n".join(_part(part, f"{where}[{i}]", images) for i, part in enumerate(_list(content, where)))


def _part(part: object, where: str, images: ImageParts | None) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind in IMAGE_PARTS:
        if images is None:
            raise PromptError(f"chat: {where} is an image, expected text in a message of this role{_REMEDY}")
        return images.add(cast("Mapping[str, Any]", part), where)
    if kind not in _TEXT_PARTS or not isinstance(text, str):
        raise PromptError(
            f"chat: {where} is of type {kind!r} with the text {_short(text)}, expected the type text and a string"
            f"{_REMEDY}"
        )
    return text


def _tools(tools: object, where: str) -> list[ToolDefinition] | None:
    return [_tool(tool, f"{where}[{i}]") for i, tool in enumerate(_list(tools, where))] or None


def _tool(tool: object, where: str) -> ToolDefinition:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f"chat: {where} is {_short(tool)}, expected a function with a name{_REMEDY}")
    parameters = function.get("parameters")
    try:
        return ToolDefinition(
            function["name"],
            _string_or_none(function.get("description"), f"{where}.function.description"),
            {} if parameters is None else parameters,
        )
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, UnicodeEncodeError):
            raise
        raise PromptError(f"chat: {where}.function.parameters is no JSON ({error}){_REMEDY}") from None


def _tool_call(call: object, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(f"chat: {where} is {_short(call)}, expected a function with a name{_REMEDY}")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    identity = _string_or_none(cast("Mapping[str, Any]", call).get("id"), f"{where}.id")
    return ToolCall(identity or "", function["name"], arguments)


def _list(value: object, where: str) -> list[object]:
    """vLLM's server hands lists over as iterators that can be read once."""
    if value is None:
        return []
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise PromptError(f"chat: {where} is {_short(value)}, expected a list{_REMEDY}")
    return list(value)


def _string_or_none(value: object, where: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise PromptError(f"chat: {where} is {_short(value)}, expected a string{_REMEDY}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
