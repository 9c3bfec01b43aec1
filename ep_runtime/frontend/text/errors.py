"""Errors of the text side. Their messages are written for the person who sent the request or started the server."""

from __future__ import annotations


class TextError(ValueError):
    """Base of the errors of this package."""


class TokenizerError(TextError):
    """The model folder holds no tokenizer that can be used; the message names the file."""


class TemplateError(TextError):
    """A chat template is missing, does not compile, refused its messages, or passed one of its limits."""


class GrammarError(TextError):
    """A schema, pattern or tool list is malformed, unsupported or too large, or its matcher passed a limit."""
