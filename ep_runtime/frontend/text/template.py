"""Chat templates: from messages to the prompt's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from ep_runtime.frontend.text.errors import TemplateError, TokenizerError
from ep_runtime.frontend.text.folder import is_template_text, read_json, read_tokenizer_files
from ep_runtime.frontend.text.messages import TemplateNeeds, normalise, template_needs
from ep_runtime.frontend.text.sandbox import BUDGET_KEY, BoundedEnvironment, Budget, RenderLimits

__all__ = ["ChatTemplate", "RenderLimits", "TemplateError"]

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", BUDGET_KEY})
_CONTINUE_TAG = "EP-CONTINUE-FROM-HERE "
"""Marks where a final message ends. Its last space shows whether the template trims the message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compiled:
    source: str
    template: jinja2.Template
    needs: TemplateNeeds


class ChatTemplate:
    """The templates of a model folder, compiled once; `render` may run in any number of threads."""

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._limits = limits or RenderLimits()
        self._variables = dict(variables or {})
        self._environment = BoundedEnvironment(now)
        self._compiled = {name: self._compile(name, source) for name, source in sources.items()}
        self._name(with_tools=False)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        override: str | Path | None = None,
        limits: RenderLimits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> ChatTemplate:
        """Finds the folder's template: `override` (a path, or a template's text), else chat_template.jinja and
        additional_chat_templates/*.jinja, else `chat_template` of tokenizer_config.json (text, or a list of named ones).

        Raises TemplateError where there is none, for one that does not compile, and for an override that does not exist.
        """
        try:
            files = read_tokenizer_files(Path(folder))
            sources = {"default": _override(override)} if override is not None else _folder_sources(Path(folder), files.config)
        except TokenizerError as error:
            raise TemplateError(str(error)) from error
        return cls(sources, {name: token.content for name, token in files.named.items()}, limits, now)

    @property
    def source(self) -> str:
        """The text of the template used with tools (what `choose_parser` reads)."""
        return self._compiled[self._name(with_tools=True)].source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `kwargs` are further variables of the template (enable_thinking, ...).

        With `continue_final_message` the text ends where the last message ends, so that the model goes on with it. Raises
        TemplateError when the template refuses the messages, fails, or passes its limits.
        """
        if not messages:
            raise TemplateError("messages is empty")
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        if taken := sorted(_RESERVED.intersection(kwargs or {})):
            raise TemplateError(f"chat_template_kwargs may not set {', '.join(taken)}")
        compiled = self._compiled[self._name(with_tools=bool(tools))]
        chat = normalise(messages, compiled.needs)
        final = _tag_final(chat) if continue_final_message else ""
        text = self._run(
            compiled,
            {
                **self._variables,
                **(kwargs or {}),
                "messages": chat,
                "tools": list(tools) if tools else None,
                "documents": list(documents) if documents is not None else None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        return _cut_at_tag(text, final) if continue_final_message else text

    def _name(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._compiled:
            return "tool_use"
        if "default" in self._compiled:
            return "default"
        raise TemplateError(f"none of the chat templates is named default: {', '.join(sorted(self._compiled))}")

    def _compile(self, name: str, source: str) -> _Compiled:
        if len(source) > self._limits.max_template_chars:
            raise TemplateError(f"chat template {name!r} is longer than {self._limits.max_template_chars} characters")
        try:
            template = self._environment.from_string(source)
            needs = template_needs(self._environment.parse(source), source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template {name!r}, line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError) as error:
            raise TemplateError(f"chat template {name!r} is nested too deeply") from error
        return _Compiled(source=source, template=template, needs=needs)

    def _run(self, compiled: _Compiled, variables: dict[str, Any]) -> str:
        budget = Budget(self._limits)
        pieces, total = [], 0
        try:
            for piece in compiled.template.generate({**variables, BUDGET_KEY: budget}):
                budget.tick()
                total += len(piece)
                budget.size(total)
                pieces.append(piece)
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or "the chat template failed") from error
        except RecursionError as error:
            raise TemplateError("the messages, or the chat template's calls, are nested too deeply") from error
        except Exception as error:  # template code may raise whatever Python's own operations raise
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return "".join(pieces)


def _override(override: str | Path) -> str:
    """The text of an override: a file's, or the argument itself when it looks like a template."""
    text = str(override)
    if isinstance(override, str) and is_template_text(text):
        return text
    try:
        return Path(override).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"chat template {text}: {error}") from error


def _folder_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; files come before tokenizer_config.json, as in transformers."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: _override(path) for name, path in files.items()}
    entry = config.get("chat_template") or (read_json(folder / "chat_template.json") or {}).get("chat_template")
    match entry:
        case None:
            raise TemplateError(f"{folder}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")
        case str():
            return {"default": entry}
        case list():
            named = [(item.get("name"), item.get("template")) for item in entry if isinstance(item, Mapping)]
            if len(named) == len(entry) and all(isinstance(name, str) and isinstance(text, str) for name, text in named):
                return {str(name): str(text) for name, text in named}
        case dict() if all(isinstance(text, str) for text in entry.values()):
            return dict(entry)
    raise TemplateError(f"{folder / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named texts")


def _tag_final(chat: list[dict[str, Any]]) -> str:
    """Appends the tag to the last message's text, and returns that text without it."""
    content = chat[-1]["content"]
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_TAG
        return content
    if not content:
        raise TemplateError("continue_final_message is set, but the last message has no text to continue")
    last = content[-1]
    content[-1] = {**last, "text": last["text"] + _CONTINUE_TAG}
    return str(last["text"])


def _cut_at_tag(text: str, final: str) -> str:
    """The rendered text up to the tag. Where the template trims messages, the end of the final message is trimmed as well."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise TemplateError("continue_final_message is set, but the chat template does not keep the last message")
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()
