"""The text machinery of the served model in one place: what is loaded once, and what each request is given of it.

Rendering, tokenizing, masks and grammars run in threads, so that one long prompt or schema does not hold every stream up.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ep_runtime.frontend.api.errors import ApiError
from ep_runtime.frontend.api.logprobs import TokenTexts
from ep_runtime.frontend.choice import ChoiceParts
from ep_runtime.frontend.compiling import GrammarCompiler
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.frontend.defaults import load_defaults
from ep_runtime.frontend.reasoning_gate import AfterReasoning, MaskSource
from ep_runtime.frontend.text.detokenizer import IncrementalDetokenizer
from ep_runtime.frontend.text.errors import GrammarError, TemplateError
from ep_runtime.frontend.text.grammar import Grammar, GrammarFactory
from ep_runtime.frontend.text.reasoning import ReasoningSplitter, reasoning_splitter
from ep_runtime.frontend.text.stops import StopMatcher
from ep_runtime.frontend.text.template import ChatTemplate
from ep_runtime.frontend.text.token_bound import utf8_size
from ep_runtime.frontend.text.tokenizer import Tokenizer
from ep_runtime.frontend.text.tools import OutputForm, choose_parser, marker_tokens, tool_parser
from ep_runtime.frontend.text_jobs import TextJobs
from ep_runtime.frontend.vision.settings import VisionSettings, load_vision
from protocol.messages import VisionInput

log = logging.getLogger(__name__)
CheckLeast = Callable[[int], None]
TAIL = 8
"""Last prompt tokens that decide how the output's first characters read."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text (empty when it was given as ids) and as token ids, with the images among them."""

    text: str
    ids: list[int]
    images: list[VisionInput] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a chat template is told beside the messages; and whether the tokenizer adds its own special tokens to its text."""

    tools: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    kwargs: dict[str, Any]
    add_special_tokens: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRules:
    """How one request's output is cut up. `tools` None: no call is looked for. `form`: what a grammar holds it to."""

    stops: list[str]
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    reasoning: bool = False
    tools: list[dict[str, Any]] | None = None
    form: OutputForm = "free"
    single_tool_call: bool = False
    tool_finish: str = "tool_calls"


class TextStack:
    """Tokenizer, chat template, grammars, and the parsers' names. Threads share what does not change."""

    def __init__(self, config: FrontendConfig, tokenizer: Tokenizer, template: ChatTemplate | None, family: str) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self.texts = TokenTexts(tokenizer)
        self.compiler = GrammarCompiler(
            GrammarFactory(tokenizer) if tokenizer.eos_token_ids else None,
            seconds=config.grammar_seconds,
            max_bytes=config.max_schema_bytes,
        )
        self.defaults = load_defaults(Path(config.model), config.generation_config == "auto")
        self.reasoning_name = config.reasoning_parser or "none"
        auto = choose_parser(template.source, family) if template is not None else "none"
        self.tool_parser_name = auto if config.tool_call_parser == "auto" else (config.tool_call_parser or "none")
        self.vision: VisionSettings | None = load_vision(
            Path(config.model),
            tokenizer,
            max_image_pixels=config.max_image_pixels,
            max_video_pixels=config.max_video_pixels,
        )
        self._jobs = TextJobs()
        # A running sequence waits for its mask, and the engine with it: masks must not queue behind somebody's long prompt.
        self.mask_pool = ThreadPoolExecutor(2, thread_name_prefix="mask")

    @classmethod
    def load(cls, config: FrontendConfig) -> TextStack:
        """Read the model's text files. Raises TextError naming what is missing."""
        folder = Path(config.tokenizer_dir)
        tokenizer = Tokenizer.load(folder)
        try:
            template = ChatTemplate.load(folder, config.chat_template)
        except TemplateError as error:
            # A base model has no template: chat is refused, completions work. One that was asked for must load.
            if config.chat_template is not None:
                raise
            log.warning("no chat: %s", error)
            template = None
        config_json = Path(config.model) / "config.json"
        family = json.loads(config_json.read_text()).get("model_type", "") if config_json.is_file() else ""
        stack = cls(config, tokenizer, template, family)
        log.info("sampling defaults of the model: %s (generation_config %s)", stack.defaults.text(), config.generation_config)
        return stack

    async def encode(self, text: str, add_special_tokens: bool, check_least: CheckLeast | None = None) -> list[int]:
        """Token ids of a text. `check_least` may raise before it is tokenized: it is told how many tokens there are at least."""
        if check_least is not None:
            check_least(self.tokenizer.least_tokens(text))
        return await self._jobs.run(lambda: self.tokenizer.encode(text, add_special_tokens), utf8_size(text))

    async def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        return await self._jobs.run(lambda: self.tokenizer.decode(ids, skip_special_tokens=False), len(ids))

    async def write_chat(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        """The chat as the template writes it. Raises ApiError 400 when there is no template or it refuses the messages."""
        template = self._template
        if template is None:
            raise ApiError(400, "The model has no chat template; use /v1/completions", param="messages", code="no_chat_template")

        def work() -> str:
            return template.render(
                messages,
                tools=options.tools or None,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                kwargs=options.kwargs,
            )

        try:
            return await self._jobs.run(work)
        except TemplateError as error:
            raise ApiError(
                400, f"The chat template refused the messages: {error}", param="messages", code="template_error"
            ) from None

    def parts(self, prompt: RenderedPrompt, rules: OutputRules) -> ChoiceParts:
        """Fresh machinery for one sequence."""
        name = self.tool_parser_name if rules.tools else "none"
        return ChoiceParts(
            detokenizer=IncrementalDetokenizer(
                self.tokenizer, prompt.ids[-TAIL:], rules.skip_special_tokens, keep_special=marker_tokens(name)
            ),
            stops=StopMatcher(rules.stops, rules.include_stop),
            reasoning=self._splitter(prompt) if rules.reasoning else None,
            tools=None if name == "none" else tool_parser(name, rules.tools, form=rules.form),
            include_stop=rules.include_stop,
            min_tokens=rules.min_tokens,
            single_tool_call=rules.single_tool_call,
            tool_finish=rules.tool_finish,
        )

    def _splitter(self, prompt: RenderedPrompt) -> ReasoningSplitter:
        return reasoning_splitter(self.reasoning_name, prompt.text)

    async def response_grammar(self, schema: dict[str, Any] | None) -> Grammar:
        """A grammar of JSON that fits `schema`, or of any JSON object. Raises ApiError."""

        def make(factory: GrammarFactory) -> Grammar:
            return factory.json_object() if schema is None else factory.json_schema(schema)

        return await self.compiler.compile(make, schema, "response_format")

    async def tool_grammar(self, tools: list[dict[str, Any]], choice: str | dict[str, Any], parallel: bool) -> Grammar:
        """A grammar of calls of these tools (`choice` "required") or of the named one. Raises ApiError."""

        def make(factory: GrammarFactory) -> Grammar:
            return factory.tool_calls(tools, choice, self.tool_parser_name, parallel=parallel)

        return await self.compiler.compile(make, tools, "tools")

    async def either_grammar(self, tools: list[dict[str, Any]], schema: dict[str, Any] | None, parallel: bool) -> Grammar:
        """A grammar of calls of these tools, or of JSON that fits `schema`. Raises ApiError."""

        def make(factory: GrammarFactory) -> Grammar:
            return factory.calls_or_json(tools, schema, self.tool_parser_name, parallel=parallel)

        return await self.compiler.compile(make, [tools, schema], "response_format")

    async def words_grammar(self, tools: list[dict[str, Any]], parallel: bool) -> Grammar:
        """A grammar of free text with calls of these tools alone in it. Raises ApiError."""

        def make(factory: GrammarFactory) -> Grammar:
            return factory.calls_in_words(tools, self.tool_parser_name, parallel=parallel)

        return await self.compiler.compile(make, tools, "tools")

    async def constrain(
        self, grammar: Grammar, prompt: RenderedPrompt, count: int, reasoning: bool
    ) -> list[tuple[MaskSource, bytes]]:
        """`count` samples' own states of one compiled grammar, each with the mask of its first token.

        With `reasoning`, a prompt that opens a reasoning lets the model finish that first. Raises ApiError 400 for a grammar that
        compiles and admits no token.
        """

        def work() -> list[tuple[MaskSource, bytes]]:
            sources: list[MaskSource] = [grammar.fork() for _ in range(count)]
            if reasoning:
                sources = [self._after_reasoning(source, prompt) for source in sources]
            mask = sources[0].mask()
            return [(source, mask) for source in sources]

        try:
            return await asyncio.get_running_loop().run_in_executor(self.mask_pool, work)
        except GrammarError as error:
            raise ApiError(400, f"The grammar cannot be used: {error}", code="invalid_grammar") from None

    def _after_reasoning(self, grammar: MaskSource, prompt: RenderedPrompt) -> MaskSource:
        splitter = self._splitter(prompt)
        if not splitter.in_reasoning:
            return grammar
        detokenizer = IncrementalDetokenizer(self.tokenizer, prompt.ids[-TAIL:], skip_special_tokens=False)
        return AfterReasoning(grammar, splitter, detokenizer, self.tokenizer)

    def close(self) -> None:
        """Let the threads end; what they compute is not waited for."""
        self._jobs.close()
        self.mask_pool.shutdown(wait=False, cancel_futures=True)
        self.compiler.close()
