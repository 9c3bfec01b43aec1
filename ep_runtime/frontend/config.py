"""The frontend's own settings: one flat frozen model, read from the JSON file that the supervisor writes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ep_runtime.frontend.text.folder import is_template_text
from ep_runtime.frontend.text.reasoning import REASONING_NAMES
from ep_runtime.frontend.text.tools import TOOL_PARSER_NAMES
from ep_runtime.frontend.vision.hosts import parse_hosts

LogLevel = Literal["debug", "info", "warning", "error"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def known_name(name: str | None, known: tuple[str, ...]) -> str | None:
    """`name`, which is one of `known` or None; raises ValueError."""
    if name is not None and name not in known:
        raise ValueError(f"there is none by the name {name!r}; known: {', '.join(known)}")
    return name


class FrontendConfig(BaseModel):
    """Everything the HTTP process is told. `model` and `tokenizer` are folders; the first served name is the one in answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    runtime_dir: str = Field(description="Folder of the ipc sockets; short, since a socket's path has at most 107 bytes")
    served_model_name: tuple[str, ...] = Field(min_length=1)
    tokenizer: str | None = Field(default=None, description="Folder of the tokenizer files; the model's folder when absent")
    chat_template: str | None = Field(default=None, description="Template text or file that replaces the model's own")
    generation_config: Literal["auto", "none"] = Field(
        default="auto", description="Sampling defaults from the model's generation_config.json, or none of them"
    )
    max_loops: int = Field(default=1, ge=1, description="Of requests that name none; more than 1 for looped models alone")
    exit_thresholds: tuple[float, ...] = Field(default=(), description="Of requests that name none; max_loops - 1, or none")
    reasoning_parser: str | None = Field(default="auto", description="Name, `auto`, or null for none")
    tool_call_parser: str | None = Field(default="auto", description="Name, `auto`, or null for none")

    listen_fd: int | None = Field(default=None, ge=0, description="Inherited listening socket, in the place of host and port")
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0 takes a free port")
    root_path: str = ""
    api_keys: tuple[str, ...] = Field(default=(), repr=False)
    cors_origins: tuple[str, ...] = ()
    log_level: LogLevel = "info"

    max_request_bytes: int = Field(default=16 * 2**20, ge=1024)
    body_seconds: Seconds = Field(default=60.0, description="Longest time for a client to send its body")
    max_image_request_bytes: int = Field(
        default=64 * 2**20, ge=1024, description="The same where images may be in it, if the model takes any"
    )
    max_queue: int = Field(default=1024, ge=0, description="Sequences accepted beyond those that run at once; more get 429")
    max_held_bytes: int = Field(default=2**30, ge=2**20, description="Bodies of all unfinished requests together; more get 429")
    stream_buffer_bytes: int = Field(default=2**20, ge=1024, description="Output a slow reader may leave unread")
    answer_bytes: int = Field(default=2**28, ge=1024, description="Memory that an answer may take which is not streamed")
    header_seconds: Seconds = Field(default=30.0, description="Longest time without a complete request head on a connection")
    write_seconds: Seconds = Field(default=30.0, description="Longest time for a client to read what its connection buffers")
    drain_seconds: Seconds = Field(default=20.0, description="Time for running requests to finish after SIGTERM")
    ready_bound_seconds: Seconds = Field(
        default=120.0, description="/ready fails when a rank acknowledges no step for longer; the longest time for a command"
    )
    grammar_seconds: Seconds = Field(default=5.0, description="Longest time to compile one request's grammar")
    max_schema_bytes: int = Field(default=128 * 2**10, ge=256)

    image_url_hosts: tuple[str, ...] = Field(default=(), description="Hosts that images are fetched from; none: no URL is fetched")
    image_url_seconds: Seconds = Field(default=10.0, description="Longest time to fetch one image, redirects included")
    image_dir: str | None = Field(default=None, description="Folder below which file:// URLs may lie; absent: nowhere")
    max_images: int = Field(default=16, ge=0, description="Images and videos of one request")
    max_image_bytes: int = Field(default=20 * 2**20, ge=1024, description="One encoded image or video")
    max_image_pixels: int = Field(default=4 * 2**20, ge=1024, description="Of one image after resizing, if the model allows more")
    max_video_pixels: int = Field(default=24 * 2**20, ge=1024, description="The same over all frames of one video")
    image_memory_bytes: int = Field(default=2**30, ge=1024, description="Decoded images of all unfinished requests; more get 429")
    decoders: int = Field(default=2, ge=1, description="Processes that decode images, one at a time each")
    decode_seconds: Seconds = Field(default=20.0, description="Longest time to decode one image or video")
    decoder_memory_bytes: int = Field(default=2**30, ge=2**28, description="Address space of each of those processes")

    @field_validator("reasoning_parser")
    @classmethod
    def _reasoning_is_known(cls, name: str | None) -> str | None:
        return known_name(name, REASONING_NAMES)

    @field_validator("tool_call_parser")
    @classmethod
    def _tool_calls_are_known(cls, name: str | None) -> str | None:
        return known_name(name, ("auto", *TOOL_PARSER_NAMES))

    @field_validator("chat_template")
    @classmethod
    def _template_is_there(cls, given: str | None) -> str | None:
        if given is not None and not is_template_text(given) and not os.path.isfile(given):
            raise ValueError(f"there is no file {given}")
        return given

    @field_validator("image_url_hosts")
    @classmethod
    def _hosts_are_hosts(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        parse_hosts(entries)
        return entries

    @model_validator(mode="after")
    def _folder_is_there(self) -> FrontendConfig:
        if self.image_dir is not None and not os.path.isdir(self.image_dir):
            raise ValueError(f"image_dir is no folder: {self.image_dir}")
        return self

    @model_validator(mode="after")
    def _socket_path_fits(self) -> FrontendConfig:
        longest = str(Path(self.runtime_dir) / "engine-4294967295")
        if len(longest.encode()) > 107:
            raise ValueError(f"runtime_dir is too long for a socket path (107 bytes): {longest}")
        return self

    @property
    def tokenizer_dir(self) -> str:
        """The folder with tokenizer.json."""
        return self.tokenizer if self.tokenizer is not None else self.model

    @classmethod
    def from_file(cls, path: str | Path) -> FrontendConfig:
        """Read the JSON file; raises pydantic.ValidationError naming the field, OSError when it cannot be read."""
        return cls.model_validate_json(Path(path).read_bytes())
