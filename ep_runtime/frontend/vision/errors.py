"""What is wrong with an image or a video, in words for whoever sent it."""

from __future__ import annotations


class MediaError(ValueError):
    """An image or video cannot be had or used; the message continues a sentence about it and names no secret of the server."""
