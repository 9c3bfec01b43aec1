"""Sampling parameters that the model's folder recommends for requests that give none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ep_runtime.frontend.text.errors import TextError
from ep_runtime.frontend.text.folder import read_json

FILE = "generation_config.json"
Finite = Annotated[float, Field(allow_inf_nan=False)]


class SamplingDefaults(BaseModel):
    """What holds where a request is silent; the names are generation_config.json's. None in `max_new_tokens`: what remains."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    temperature: Finite = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=-1)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
    min_p: Finite = Field(default=0.0, ge=0, le=1)
    repetition_penalty: Finite = Field(default=1.0, gt=0)
    max_new_tokens: int | None = Field(default=None, ge=1)

    def text(self) -> str:
        """The values that differ from OpenAI's, for the log."""
        changed = self.model_dump(exclude_defaults=True)
        return ", ".join(f"{name} {value:g}" for name, value in changed.items()) or "none"


def sampling_defaults(found: dict[str, Any] | None) -> SamplingDefaults:
    """From the contents of generation_config.json. `do_sample: false` is temperature 0. Raises pydantic.ValidationError."""
    given = {name: value for name, value in (found or {}).items() if value is not None}
    if given.get("do_sample") is False:
        given["temperature"] = 0.0
    return SamplingDefaults.model_validate(given)


def load_defaults(folder: Path, use: bool) -> SamplingDefaults:
    """The model folder's recommendation, or OpenAI's values when `use` is false. Raises TextError naming the file and the field."""
    if not use:
        return SamplingDefaults()
    try:
        return sampling_defaults(read_json(folder / FILE))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise TextError(
            f"{folder / FILE}: {where}: {first['msg']} (found {first['input']!r}); generation_config 'none' ignores the file"
        ) from error
