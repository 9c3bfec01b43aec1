"""Where a RuntimeConfig comes from: flags, then `EP_RUNTIME_*` variables, then a YAML file, then defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from ep_runtime.config import SECRETS, RuntimeConfig

ENV_PREFIX = "EP_RUNTIME_"


class ConfigRefused(Exception):
    """The settings cannot be read or contradict each other; the message has one line for each problem."""


class _Sources(RuntimeConfig, BaseSettings):
    """Serve mixture-of-experts models over several ranks to OpenAI clients.

    Every flag can also be an environment variable (EP_RUNTIME_PORT=8001) or a line of the --config file (port: 8001).
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_prog_name="ep-runtime",
        cli_shortcuts={"cors-origins": "allowed-origins"},  # vLLM's name
        nested_model_default_partial_update=False,
    )

    config: Path | None = Field(None, description="YAML file with these settings")
    token_file: Path | None = Field(None, description="file that holds the token (one line)")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _YamlFile(settings_cls)


class _YamlFile(PydanticBaseSettingsSource):
    """The file that an earlier source names as `config`."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if path is None:
            return {}
        if not Path(path).is_file():
            raise SettingsError(f"config: there is no file {path}")
        try:
            return YamlConfigSettingsSource(self.settings_cls, yaml_file=path)()
        except (yaml.YAMLError, ValueError) as error:
            raise SettingsError(f"config: {path} is not a YAML mapping of settings: {error}") from error


def read_config(argv: list[str]) -> RuntimeConfig:
    """The configuration from `argv` (without the program's name), the environment, and the YAML file that they name.

    Raises `ConfigRefused`; `--help` and malformed flags end the process as argparse does.
    """
    unknown = sorted(_unknown_variables())
    if unknown:
        raise ConfigRefused(f"unknown setting in the environment: {', '.join(unknown)}")
    try:
        sources = CliApp.run(_Sources, cli_args=argv)
    except ValidationError as error:
        raise ConfigRefused("\n".join(_problem(problem) for problem in error.errors())) from error
    except SettingsError as error:
        raise ConfigRefused(str(error)) from error
    values = sources.model_dump(exclude={"config", "token_file"})
    if sources.token_file is not None:
        values["token"] = read_token(sources.token_file)
    return RuntimeConfig.model_validate(values)


def read_token(path: Path) -> str:
    """The shared secret in `path`; raises `ConfigRefused` when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigRefused(f"token_file: {error}") from error


def _unknown_variables() -> list[str]:
    known = {f"{ENV_PREFIX}{name}".upper() for name in _Sources.model_fields}
    return [name for name in os.environ if name.upper().startswith(ENV_PREFIX) and name.upper() not in known]


def _problem(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if not where:
        return message
    return f"{where}: {message}" if where in SECRETS else f"{where}: {message} (given: {problem['input']!r})"
