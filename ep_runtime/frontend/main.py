"""`python -P -m ep_runtime.frontend.main --config-json PATH`: the HTTP process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import socket
import sys
from importlib.metadata import PackageNotFoundError, version

from pydantic import ValidationError

from ep_runtime.frontend.app import build_app, open_to
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.frontend.context import Frontend
from ep_runtime.frontend.engine_client import EngineClient
from ep_runtime.frontend.journal import Journal
from ep_runtime.frontend.link import ZmqLink
from ep_runtime.frontend.listening import listen_http
from ep_runtime.frontend.metrics import Metrics
from ep_runtime.frontend.server import adopt, serve
from ep_runtime.frontend.text.errors import TextError
from ep_runtime.frontend.text_stack import TextStack

EXIT_CONFIG = 2
"""Exit status when the settings, the model's text files or the address cannot be used: starting again does not help."""

REFUSED_LINE = "refused: "
MOST_REASON = 1000


def main(argv: list[str] | None = None) -> int:
    """Run the frontend; returns the exit status: 0 after SIGTERM, EXIT_CONFIG when it cannot start."""
    parser = argparse.ArgumentParser(description="The HTTP process of ep_runtime; started by its supervisor.")
    parser.add_argument("--config-json", required=True, help="file with a FrontendConfig as JSON")
    path = parser.parse_args(argv).config_json
    try:
        config = FrontendConfig.from_file(path)
        logging.basicConfig(
            level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
        )
        allow_many_files()
        text = TextStack.load(config)
        sock = listen_http(config.host, config.port) if config.listen_fd is None else adopt(config.listen_fd)
    except (ValidationError, TextError, ValueError, OSError) as error:
        sys.stderr.write(f"frontend: {error}\n")
        sys.stdout.write(refusal_line(str(error)))
        return EXIT_CONFIG
    with sock:
        asyncio.run(run(config, text, sock))
    return 0


async def run(config: FrontendConfig, text: TextStack, sock: socket.socket) -> None:
    """Make the process's parts, serve, and take them down again."""
    metrics = Metrics()
    journal = Journal()
    engine = EngineClient(ZmqLink(config.runtime_dir), journal, metrics)
    front = Frontend(config, text, journal, engine, metrics)
    try:
        await serve(front, open_to(config.cors_origins, build_app(front, package_version())), sock)
        journal.check_integrity()
    finally:
        front.close()
        engine.close()
        text.close()


def refusal_line(reason: str) -> str:
    """The line of standard output that tells the supervisor why there is no frontend, for its own last line."""
    return f"{REFUSED_LINE}{'; '.join(reason.splitlines())[:MOST_REASON]}\n"


def package_version() -> str:
    """Of the installed distribution; `0` in a source tree that is not installed."""
    try:
        return version("ep-runtime")
    except PackageNotFoundError:
        return "0"


def allow_many_files() -> None:
    """Every connection is an open file, and the usual limit of a process is a thousand."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    end_status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A grammar that is still being compiled cannot be stopped, and an ordinary exit would wait for its thread.
    os._exit(end_status)
