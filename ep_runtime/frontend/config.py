"""The frontend's own settings: one flat frozen model, read from the JSON file that the supervisor writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LogLevel = Literal["debug", "info", "warning", "error"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


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
