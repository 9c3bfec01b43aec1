"""Models of /v1/chat/completions requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ep_runtime.frontend.api.common_schema import MAX_LOGPROBS, UNSUPPORTED, CacheHint, SamplingFields, StrictModel, refuse

FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"
MAX_TOOLS = 128


class TextPart(CacheHint):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


class RefusalPart(CacheHint):
    """What the assistant said in place of an answer; a text like any other."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(StrictModel):
    """Where an image is, or in a data URI the image itself."""

    url: str
    detail: Literal["auto", "low", "high"] | None = Field(default=None, description="Accepted and not used")


class ImagePart(CacheHint):
    """An image in a message, for models that take images."""

    type: Literal["image_url"]
    image_url: ImageUrl


class VideoUrl(StrictModel):
    """Where a video is, or in a data URI the video itself."""

    url: str


class VideoPart(CacheHint):
    """A video in a message, for models that take videos."""

    type: Literal["video_url"]
    video_url: VideoUrl


def _known_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("text", "image_url", "video_url"):
        raise refuse("messages", f"content parts of type {kind[:40]!r} are not supported: text, image_url and video_url are")
    return part


def _only_text(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise refuse(
            "messages", f"content parts of type {kind[:40]!r} are not supported in the assistant's messages: text and refusal are"
        )
    return part


def _part_tag(part: Any) -> str | None:
    """Names the branch of a part's union otherwise than its fields, so that the path of an error tells them apart."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"{kind} part" if isinstance(kind, str) else None


TextOnly = Annotated[Annotated[TextPart | RefusalPart, Field(discriminator="type")], BeforeValidator(_only_text)]
AnyPart = Annotated[
    Annotated[TextPart, Tag("text part")]
    | Annotated[ImagePart, Tag("image_url part")]
    | Annotated[VideoPart, Tag("video_url part")],
    Discriminator(
        _part_tag,
        custom_error_type="no_part",
        custom_error_message="Input should be an object whose type is text, image_url or video_url",
    ),
]
Part = Annotated[AnyPart, BeforeValidator(_known_part)]
TextContent = str | Annotated[list[TextOnly], Field(fail_fast=True, min_length=1)]
Content = str | Annotated[list[Part], Field(fail_fast=True, min_length=1)]


class SystemMessage(CacheHint):
    """Instructions; `developer` is OpenAI's newer word for `system`."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(CacheHint):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(StrictModel):
    """A function's name and its arguments, a JSON object as text."""

    name: str
    arguments: str
    parsed_arguments: Any = Field(default=None, description="Accepted and not used")


class MessageToolCall(StrictModel):
    """A call that the assistant made in an earlier turn."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class AssistantMessage(CacheHint):
    """An earlier answer, as this server gives it. `reasoning` is vLLM's newer name of `reasoning_content`."""

    role: Literal["assistant"]
    content: TextContent | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    refusal: str | None = Field(default=None, description="Accepted and not used")
    annotations: list[Any] | None = Field(default=None, description="Accepted and not used")
    parsed: Any = Field(default=None, description="Accepted and not used, as parsed_arguments: OpenAI's client sends its own back")
    audio: None = None
    function_call: None = None

    @field_validator("reasoning")
    @classmethod
    def _one_reasoning(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("reasoning_content") not in (None, value):
            raise PydanticCustomError("refused", "reasoning and reasoning_content differ; give one of them")
        return value


class ToolMessage(CacheHint):
    """What a called function returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(CacheHint):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(CacheHint):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    """Names one of the functions in `tools`."""

    name: str


class NamedToolChoice(StrictModel):
    """Forces a call of one function."""

    type: Literal["function"]
    function: FunctionName


class AllowedFunction(FunctionDefinition):
    """Names one of the functions in `tools`, whose definition counts, whatever else is said of it here."""

    name: str


class AllowedTool(Tool):
    """One of the tools that may be called."""

    function: AllowedFunction


class AllowedTools(StrictModel):
    """Some of `tools`, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedToolChoice(StrictModel):
    """Lets some of `tools` be called; the model is told of all."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required", "any"] | Annotated[NamedToolChoice | AllowedToolChoice, Field(discriminator="type")]
)


class TextFormat(StrictModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """A named JSON schema."""

    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(SamplingFields):
    """Body of POST /v1/chat/completions."""

    unsupported: ClassVar[Mapping[str, str]] = {
        **UNSUPPORTED,
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "the server answers with text",
        "web_search_options": "the server has no search",
        "echo": "use /v1/completions",
        "chat_template": "the server's own is used",
        "documents": "write them into the messages",
        "include_reasoning": "reasoning comes apart from the content, as reasoning and reasoning_content",
        "mm_processor_kwargs": "images are prepared as the model's own files say",
        "enable_thinking": "give it in chat_template_kwargs",
        "reasoning": "use reasoning_effort",
        "thinking": "give what the model's template knows in chat_template_kwargs",
    }

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = Field(default=None, description="any is Mistral's word for required")
    parallel_tool_calls: bool | None = Field(default=None, description="false keeps the first call alone")
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = Field(default=False, description="The template usually writes them itself")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, description="Given to the chat template")
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    prediction: dict[str, Any] | None = Field(default=None, description="Accepted and not used")
    verbosity: str | None = Field(default=None, description="Accepted and not used")

    @model_validator(mode="after")
    def _refuse_chat_contradictions(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refuse("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "top_logprobs is only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise refuse("continue_final_message", "continue_final_message needs an assistant message at the end of messages")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) != len(names):
            raise refuse("tools", "two tools have the same name")
        if self.tool_choice not in (None, "none") and not names and (self.tools is None or self.tool_choice != "auto"):
            raise refuse("tool_choice", "tool_choice is only allowed when tools are given")
        for name in self.chosen_names or ():
            if name not in names:
                raise refuse("tool_choice", f"tool_choice names {name[:64]!r}, which is not in tools")
        if self.ignore_eos and self.has_grammar:
            raise refuse("ignore_eos", "ignore_eos contradicts an output whose grammar ends")

    @property
    def wants_json(self) -> bool:
        """True when response_format asks for JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def response_schema(self) -> dict[str, Any] | None:
        """The schema of the JSON that is asked for; None for any object."""
        return self.response_format.json_schema.schema_ if isinstance(self.response_format, JsonSchemaFormat) else None

    @property
    def forces_tool(self) -> bool:
        """True when the answer must be a tool call."""
        if isinstance(self.tool_choice, AllowedToolChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice in ("required", "any") or isinstance(self.tool_choice, NamedToolChoice)

    @property
    def has_grammar(self) -> bool:
        """True when the answer is held to a grammar."""
        return self.wants_json or self.forces_tool or isinstance(self.tool_choice, AllowedToolChoice)

    @property
    def chosen_names(self) -> list[str] | None:
        """The functions that tool_choice names, which alone may be called; None when it names none."""
        match self.tool_choice:
            case NamedToolChoice(function=function):
                return [function.name]
            case AllowedToolChoice(allowed_tools=allowed):
                return [tool.function.name for tool in allowed.tools]
        return None

    @property
    def active_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of, as plain data; none when tool_choice forbids calls."""
        if not self.tools or self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_none=True) for tool in self.tools]

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Those of `active_tools` that may be called."""
        names = self.chosen_names
        return [tool for tool in self.active_tools if names is None or tool["function"]["name"] in names]

    @property
    def token_limit(self) -> int | None:
        """max_completion_tokens or its older name."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
