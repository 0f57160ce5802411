"""GET /metrics. Owns: names, labels and buckets (vLLM's, so that its dashboards work), and what the
server itself counts. The engine's own numbers are read from its latest snapshot at each scrape.

No label ever holds what a client chose: model names are the served ones, paths are route templates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from moestro.server import histogram as h
from moestro.server.engine_metrics import engine_families
from moestro.server.engine_port import Engine
from moestro.server.settings import ServerSettings
from moestro.stats import EngineStats
from moestro.types import Finish, Timing

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
LABELS = ("model_name", "engine")
REASONS = tuple(f.value for f in Finish)
REJECTIONS = ("queue_full", "loading", "draining", "engine_dead", "context_length_exceeded")
TOKENS = h.one_two_five(131072)  # not the model's own limit, so that dashboards stay comparable
HISTOGRAMS: Mapping[str, Sequence[float]] = {
    "time_to_first_token_seconds": h.TTFT,
    "inter_token_latency_seconds": h.PER_TOKEN,
    "request_time_per_output_token_seconds": h.PER_TOKEN,
    "e2e_request_latency_seconds": h.REQUEST,
    "request_queue_time_seconds": h.REQUEST,
    "request_inference_time_seconds": h.REQUEST,
    "request_prefill_time_seconds": h.REQUEST,
    "request_decode_time_seconds": h.REQUEST,
    "request_exposed_fetch_seconds": h.TTFT,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "request_params_n": h.CHOICES,
    "request_params_max_tokens": TOKENS,
    "request_num_preemptions": h.PREEMPTIONS,
    "iteration_tokens_total": h.STEP_TOKENS,
}


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice at its end. Times in seconds as the client saw them; `timing` is the engine's."""

    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    total: float
    first_to_last: float
    timing: Timing | None


class Metrics(Collector):
    """Everything that /metrics shows."""

    def __init__(self, settings: ServerSettings, engine: Engine) -> None:
        self._engine = engine
        self._prefix = settings.metrics_prefix
        self._own = (settings.served_model_names[0], "0")
        self._totals = h.Totals()
        self._finished = dict.fromkeys(REASONS, 0)
        self._rejected = dict.fromkeys(REJECTIONS, 0)
        self._seen: EngineStats | None = None
        self._http: dict[tuple[str, str, str], int] = {}
        self._histograms = {name: h.Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self.first_token = self._histograms["time_to_first_token_seconds"].observe
        self.inter_token = self._histograms["inter_token_latency_seconds"].observe
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def text(self) -> bytes:
        """Return the exposition."""
        self.look()
        return generate_latest(self.registry)

    def called(self, n: int) -> None:
        """Record one admitted call for `n` choices."""
        self._histograms["request_params_n"].observe(n)

    def rejected(self, code: str | None) -> None:
        """Record a call that was not admitted; codes that are not listed are not counted."""
        if code in self._rejected:
            self._rejected[code] += 1

    def http(self, route: str, method: str, status: int, _seconds: float) -> None:
        """Record one answered HTTP request; `status` 0 = the client left before an answer."""
        key = (route, method, str(status) if status else "499")
        self._http[key] = self._http.get(key, 0) + 1

    def look(self) -> None:
        """Record the steps that the engine's snapshot lists, if it is one not seen yet.

        Called with every batch of tokens and at every scrape, which is often enough: an engine
        that works sends tokens, one that idles takes no steps.
        """
        stats = self._engine.snapshot
        if stats is self._seen:
            return
        self._seen = stats
        observe = self._histograms["iteration_tokens_total"].observe
        for tokens in stats.step_tokens:
            observe(tokens)

    def finished(self, record: Finished) -> None:
        """Record the end of one choice."""
        self._finished[record.finish.value] += 1
        observe = self._observe
        observe("e2e_request_latency_seconds", record.total)
        observe("request_prompt_tokens", record.prompt_tokens)
        observe("request_generation_tokens", record.completion_tokens)
        observe("request_params_max_tokens", record.max_tokens)
        if record.completion_tokens > 1:
            each = record.first_to_last / (record.completion_tokens - 1)
            observe("request_time_per_output_token_seconds", each)
        if record.timing is not None:
            self._timed(record.timing)

    def _timed(self, timing: Timing) -> None:
        self._observe("request_queue_time_seconds", timing.queued)
        self._observe("request_prefill_time_seconds", timing.prefill)
        self._observe("request_decode_time_seconds", timing.decode)
        self._observe("request_inference_time_seconds", timing.prefill + timing.decode)
        self._observe("request_exposed_fetch_seconds", timing.exposed_fetch)
        if timing.preemptions:
            self._observe("request_num_preemptions", timing.preemptions)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield every family. Called by prometheus_client at a scrape."""
        yield from engine_families(self._engine, self._prefix, self._own, self._totals)
        yield self._by_reason("request_success", "Finished choices.", self._finished)
        yield self._by_reason(
            "admission_rejections", "Calls not admitted.", self._rejected, key="reason"
        )
        for name, histogram in self._histograms.items():
            family = HistogramMetricFamily(self._prefix + name, name, labels=LABELS)
            histogram.add_to(family, self._own)
            yield family
        yield self._http_family()

    def _by_reason(
        self, name: str, text: str, counts: dict[str, int], key: str = "finished_reason"
    ) -> Metric:
        family = CounterMetricFamily(self._prefix + name, text, labels=(*LABELS, key))
        for reason, count in counts.items():
            family.add_metric((*self._own, reason), count)
        return family

    def _http_family(self) -> Metric:
        family = CounterMetricFamily(
            "http_requests", "Answered requests.", labels=("handler", "method", "status")
        )
        for labels, count in self._http.items():
            family.add_metric(labels, count)
        return family
