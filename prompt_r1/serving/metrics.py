"""What a server has done, in the text format of Prometheus (`pip install prometheus-client`)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from prompt_r1.spending import Spending


@dataclass(frozen=True)
class ServerMetrics(Collector):
    """The counts of a server since its start."""

    responses: Counter[str]  # by status
    games: Counter[str]  # by how they ended
    seconds: float  # of all ended games
    running: int  # games
    spent: Spending  # of the environment

    def collect(self) -> Iterator[Metric]:
        """The metrics with their names."""
        for name, label, counts in [
            ("responses", "status", self.responses),
            ("games", "outcome", self.games),
        ]:
            family = CounterMetricFamily(f"prompt_r1_{name}", f"{name} by {label}", labels=[label])
            for value, count in counts.items():
                family.add_metric([value], count)
            yield family
        yield GaugeMetricFamily("prompt_r1_running_games", "games that are being played", self.running)
        total = self.games.total()
        yield SummaryMetricFamily("prompt_r1_game_seconds", "time of ended games", total, self.seconds)
        for name in ("calls", "tokens_in", "tokens_out", "usd"):
            about = f"{name} of the environment"
            yield CounterMetricFamily(f"prompt_r1_environment_{name}", about, getattr(self.spent, name))

    def exposition(self) -> bytes:
        """The metrics as text."""
        return generate_latest(self)
