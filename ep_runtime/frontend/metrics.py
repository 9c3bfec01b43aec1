"""Prometheus metrics of the HTTP process, in a registry of their own. What the engine reports is read when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.messages import EngineStats

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


class EngineCollector(Collector):
    """Gauges and totals of the engine's last report; nothing while there is none."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """One family a field of EngineStats."""
        stats = self._stats()
        if stats is None:
            return
        gauges: dict[str, tuple[str, float]] = {
            "ep_running_sequences": ("Sequences that run; one that ends keeps its slot until its last step is read", stats.running),
            "ep_waiting_sequences": ("Sequences in the engine's queue", stats.waiting),
            "ep_free_blocks": ("Free blocks of KV cache", stats.free_blocks),
            "ep_total_blocks": ("Blocks of KV cache", stats.total_blocks),
            "ep_free_slots": ("Free slots", stats.free_slots),
            "ep_total_slots": ("Slots", stats.total_slots),
            "ep_step": ("Last step of the head in this epoch", stats.step),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        counters: dict[str, tuple[str, float]] = {
            "ep_preemptions": ("Sequences preempted in this epoch", stats.preemptions),
            "ep_engine_prompt_tokens": ("Prompt tokens computed in this epoch, replays included", stats.prompt_tokens),
            "ep_engine_generated_tokens": ("Tokens sampled in this epoch", stats.generated_tokens),
            "ep_engine_cached_tokens": ("Prompt tokens found in the prefix tree in this epoch", stats.cached_tokens),
            "ep_engine_host_seconds": ("Seconds of the head's loop outside its waits, in this epoch", stats.host_seconds),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        ranks = GaugeMetricFamily("ep_rank_last_step", "Last step that each rank acknowledged", labels=["rank"])
        for rank, step in enumerate(stats.ranks):
            ranks.add_metric([str(rank)], step)
        yield ranks


DROP_REASONS = ("malformed", "epoch", "ended")
PROMPT_ROW = "prompt"
"""Label of tokens that a prompt's row has sampled where several loops may run: a prompt's rows differ in how many."""
RECOVERY_PHASES = ("leave", "spawn", "import", "load", "rendezvous", "replay", "total")
"""`total` is from the failure to the next epoch's start; `replay` comes after it."""


class Metrics:
    """All counters and histograms that the frontend itself moves; names are listed in docs/http_api.md."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registry = registry
        self.requests = Counter("ep_requests", "HTTP generation requests", ["endpoint", "outcome"], registry=registry)
        self.sequences = Counter("ep_sequences", "Sequences ended", ["finish"], registry=registry)
        self.prompt_tokens = Counter("ep_prompt_tokens", "Prompt tokens of accepted sequences", registry=registry)
        self.generated_tokens = Counter("ep_generated_tokens", "Tokens received from the engine", registry=registry)
        self.loop_tokens: Counter | None = None
        self.cached_tokens = Counter("ep_cached_tokens", "Prompt tokens found in the prefix tree", registry=registry)
        self.first_token = Histogram(
            "ep_time_to_first_token_seconds", "Submission to first token", buckets=LATENCY_BUCKETS, registry=registry
        )
        self.inter_token = Histogram(
            "ep_inter_token_seconds", "Between updates of a sequence", buckets=TOKEN_BUCKETS, registry=registry
        )
        self.per_output_token = Histogram(
            "ep_time_per_output_token_seconds",
            "First to last token, divided by the tokens between",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "ep_request_seconds", "Generation request, start to end", ["endpoint"], buckets=LATENCY_BUCKETS, registry=registry
        )
        self.journal_sequences = Gauge("ep_journal_sequences", "Unfinished sequences in the journal", registry=registry)
        self.image_bytes = Gauge("ep_image_bytes", "Decoded images of unfinished requests", registry=registry)
        self.epoch = Gauge("ep_epoch", "Number of the newest epoch", registry=registry)
        self.ready = Gauge("ep_ready", "1 while /ready says 200", registry=registry)
        self.epochs_ended = Counter("ep_epochs_ended", "Epochs that ended", registry=registry)
        self.replayed_sequences = Counter("ep_replayed_sequences", "Sequences continued in a later epoch", registry=registry)
        self.replayed_tokens = Counter(
            "ep_replayed_tokens", "Prompt and generated tokens prefilled again for that", registry=registry
        )
        self.recoveries = Counter("ep_recoveries", "Epochs that took the place of one that failed", registry=registry)
        self.recovery_seconds = Counter("ep_recovery_seconds", "Seconds of all recoveries by phase", ["phase"], registry=registry)
        self.last_recovery_seconds = Gauge(
            "ep_last_recovery_seconds", "Seconds of the last recovery by phase", ["phase"], registry=registry
        )
        self.dropped = Counter(
            "ep_dropped_results", "Messages or updates of the engine that nobody may see", ["reason"], registry=registry
        )
        for reason in DROP_REASONS:
            self.dropped.labels(reason)
        for phase in RECOVERY_PHASES:
            self.recovery_seconds.labels(phase)

    def serve_loops(self, most: int) -> None:
        """The model runs up to so many loops. May be called any number of times; without it there is no counter of them."""
        if self.loop_tokens is None:
            self.loop_tokens = Counter(
                "ep_generated_tokens_by_loops", "Tokens received, by loops that they ran", ["loops"], registry=self.registry
            )
            for loops in (PROMPT_ROW, *range(1, most + 1)):
                self.loop_tokens.labels(str(loops))

    def observe_loops(self, tokens: int, depths: Sequence[int]) -> None:
        """Count a sequence's new tokens: by their `depths`, 0 for a prompt's row, or as of one loop where it has none."""
        if self.loop_tokens is None:
            return
        if not depths and tokens:
            self.loop_tokens.labels("1").inc(tokens)
        for depth in depths:
            self.loop_tokens.labels(str(depth or PROMPT_ROW)).inc()

    def observe_recovery(self, seconds: Mapping[str, float]) -> None:
        """A recovery that is over but for the replay; seconds by phase, where an absent phase did not occur."""
        self.recoveries.inc()
        for phase in dict.fromkeys((*RECOVERY_PHASES, *seconds)):
            if phase != "replay":
                self._observe_phase(phase, seconds.get(phase, 0.0))

    def observe_replay(self, seconds: float) -> None:
        """Every sequence of an earlier epoch has gone on."""
        self._observe_phase("replay", seconds)

    def _observe_phase(self, phase: str, seconds: float) -> None:
        self.recovery_seconds.labels(phase).inc(max(0.0, seconds))
        self.last_recovery_seconds.labels(phase).set(max(0.0, seconds))
