"""The jinja2 environment that chat templates run in, with its bounds.

Every loop step, call and filter counts as a tick of the render's budget, which limits the processor time of the rendering thread;
every text or list that an operator, call or filter makes is limited in size. What is not interrupted is one single operation of
jinja2 or Python on inputs that already fit these limits.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUDGET_KEY = "render budget"
"""Name of the budget among a render's variables; the space keeps templates from reading or setting it."""

_STRFTIME = re.compile(r"(?:[^%]|%[-_0^#]?[A-Za-z%])*")
_TICKS_PER_CLOCK = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderLimits:
    """Bounds of one render. `max_chars` limits the output and every intermediate text or list; `cpu_seconds` the thread's time."""

    max_chars: int = 8 << 20
    max_template_chars: int = 1 << 20
    cpu_seconds: float = 2.0


class Budget:
    """What one render may still use."""

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        self._end = time.thread_time() + limits.cpu_seconds
        self._ticks = 0

    def tick(self) -> None:
        """Counts a step. Raises SecurityError when the time is used up."""
        self._ticks += 1
        if self._ticks % _TICKS_PER_CLOCK == 0 and time.thread_time() > self._end:
            raise SecurityError(f"the template ran longer than {self._limits.cpu_seconds:g} s")

    def size(self, amount: int) -> None:
        """Raises SecurityError when a text or list of `amount` items is too large."""
        if amount > self._limits.max_chars:
            raise SecurityError(f"the template makes a text or list of {amount} items; the limit is {self._limits.max_chars}")

    def check(self, value: Any) -> Any:
        """`value`, if its size is within the limit."""
        if isinstance(value, str | bytes | list | tuple | dict):
            self.size(len(value))
        elif isinstance(value, int):
            self.size(value.bit_length() // 8)
        return value

    def arguments(self, args: Iterable[Any]) -> None:
        """Raises SecurityError for a number so large that, as a width or count, it would make a text past the limit."""
        for value in args:
            if isinstance(value, int):
                self.size(abs(value))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's immutable sandbox, with the ticks and size checks of `Budget` compiled into every template."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        for name in list(self.filters):
            self.filters[name] = _bounded_filter(name, self.filters[name])
        self.filters["ticking"] = _ticking
        self.filters["sized"] = _sized
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = functools.partial(_strftime_now, now)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filter_node(loop.iter, "ticking")
        _wrap_joins(tree)
        tree.set_environment(self)
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or method of the template, within the budget."""
        budget = _budget(__context)
        budget.tick()
        budget.arguments((*args, *kwargs.values()))
        # jinja2 hands out str.format as a wrapper of its own.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _check_text_call(budget, getattr(__obj, "__name__", ""), owner, args)
        return budget.check(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluates an arithmetic operator, within the budget."""
        budget = _budget(context)
        budget.tick()
        for one, other in ((left, right), (right, left)):
            if operator == "*" and isinstance(one, str | list | tuple) and isinstance(other, int):
                budget.size(len(one) * other)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.size(left.bit_length() * abs(right))
        if operator == "%" and isinstance(left, str):
            _check_format(budget, left)
            budget.arguments(right if isinstance(right, tuple) else (right,))
        return budget.check(super().call_binop(context, operator, left, right))


class GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant wrote, for training; here its body is all that counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Puts the body in place of the tag, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _budget(context: Context) -> Budget:
    budget = context.resolve(BUDGET_KEY)
    assert isinstance(budget, Budget), "a render without a budget"
    return budget


def _filter_node(node: nodes.Node, name: str) -> nodes.Node:
    return nodes.Filter(node, name, [], [], None, None).set_lineno(node.lineno)


def _wrap_joins(node: nodes.Node) -> None:
    """Puts a size check around every `~`, the one operator that the sandbox does not intercept."""
    for field, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, field, [_wrapped(child) for child in value])
        elif isinstance(value, nodes.Node):
            setattr(node, field, _wrapped(value))


def _wrapped(child: Any) -> Any:
    if isinstance(child, nodes.Node):
        _wrap_joins(child)
    return _filter_node(child, "sized") if isinstance(child, nodes.Concat) else child


class _Ticking:
    """An iterable that ticks at each step and keeps its length, for `loop.length`."""

    def __init__(self, values: Any, budget: Budget) -> None:
        self._values = values
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.tick()
            yield value

    def __len__(self) -> int:
        return len(self._values)


@jinja2.pass_context
def _ticking(context: Context, values: Any) -> Any:
    # An undefined value must stay one: jinja2 decides what looping over it means.
    return values if isinstance(values, jinja2.Undefined) else _Ticking(values, _budget(context))


@jinja2.pass_context
def _sized(context: Context, value: Any) -> Any:
    return _budget(context).check(value)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with a tick, a check of its arguments and one of its result; what it wants of jinja2 is passed on."""
    wants = getattr(function, "jinja_pass_arg", None)

    @jinja2.pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.tick()
        budget.arguments((*args, *kwargs.values()))
        if isinstance(value, str):
            _check_text_call(budget, name, value, args)
        lead: tuple[Any, ...] = ()
        if wants is not None:
            lead = ({"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[wants.name],)
        if name == "join":
            value = _bounded_join(budget, value, args, kwargs)
        return budget.check(function(*lead, value, *args, **kwargs))

    return bounded


def _bounded_join(budget: Budget, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    parts = list(value)
    separator = str(args[0] if args else kwargs.get("d", ""))
    budget.size(sum(len(part) if isinstance(part, str) else 1 for part in parts) + len(separator) * len(parts))
    return parts


def _check_text_call(budget: Budget, name: str, text: str, args: tuple[Any, ...]) -> None:
    """Refuses, before it is made, a replacement, join or formatted text that would pass the limit."""
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        budget.size(len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        budget.size(len(text) * len(args[0]) + sum(len(part) for part in args[0] if isinstance(part, str)))
    elif name in ("format", "format_map"):
        _check_format(budget, text)


def _check_format(budget: Budget, text: str) -> None:
    """A width in a format text makes as many characters as it says."""
    budget.size(sum(int(digits[:12]) for digits in re.findall(r"\d{4,}", text)))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers has it: no HTML escapes, and json.dumps' options."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(now: Callable[[], datetime], text: str) -> str:
    if len(text) > 256 or _STRFTIME.fullmatch(text) is None:
        raise SecurityError(f"unsupported date format {text[:40]!r}")
    return now().strftime(text)
