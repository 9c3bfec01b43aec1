"""The frontend process as its supervisor sees it: its settings, its start, and the word that the engine is gone."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import zmq

from ep_runtime.config import RuntimeConfig
from ep_runtime.frontend.config import FrontendConfig
from ep_runtime.supervise.loop import Loop
from ep_runtime.supervise.process import Child, Exit
from protocol.codec import encode
from protocol.messages import EpochEnded

TELL_MILLISECONDS = 500


def frontend_config(config: RuntimeConfig, model: Path, runtime_dir: Path) -> FrontendConfig:
    """What the frontend is told, from the resolved configuration and the model's folder."""
    return FrontendConfig(
        model=str(model),
        runtime_dir=str(runtime_dir),
        served_model_name=(config.served_model_name or config.model,),
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
        generation_config=config.generation_config,
        reasoning_parser=config.reasoning_parser or "auto",
        tool_call_parser=config.tool_call_parser or "auto",
        host=config.host,
        port=config.port,
        api_keys=() if config.api_key is None else (config.api_key,),
        cors_origins=config.cors_origins,
        log_level=config.log_level,
        max_request_bytes=config.max_request_bytes,
        max_queue=config.max_queue,
        drain_seconds=max(config.drain_timeout, 0.1),
    )


class Frontend:
    """One frontend process, watched until it ends. `on_end` is called once."""

    def __init__(self, loop: Loop, module: str, config: FrontendConfig, on_end: Callable[[Exit], None]) -> None:
        self._loop = loop
        self._runtime_dir = Path(config.runtime_dir)
        self._on_end = on_end
        path = self._runtime_dir / "frontend.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config.model_dump(mode="json"), indent=2), encoding="utf-8")
        self.child = Child("frontend", module, ["--config-json", str(path)])
        loop.watch(self.child.pidfd, self._ended)

    def end(self, grace: float) -> None:
        """SIGTERM now, so that it drains; SIGKILL after `grace` seconds."""
        self.child.send(signal.SIGTERM)
        self._loop.later(grace, lambda: self.child.send(signal.SIGKILL))

    def tell_ended(self, epoch: int, reason: str) -> None:
        """Have every open request answered: no engine will."""
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.linger = TELL_MILLISECONDS
            socket.connect(f"ipc://{self._runtime_dir}/frontend")
            socket.send(encode(EpochEnded(epoch=epoch, reason=reason, final=True)))

    def _ended(self) -> None:
        self._loop.forget(self.child.pidfd)
        self._on_end(self.child.reap())
