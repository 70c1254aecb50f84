"""Settings of the server of a pair: `prompt-r1 serve`."""

from dataclasses import dataclass

from prompt_r1.config.environment import EnvironmentConfig
from prompt_r1.config.fields import NOT_NEGATIVE, POSITIVE, Range, setting


@dataclass(frozen=True)
class ServeConfig(EnvironmentConfig):
    """Settings of `prompt-r1 serve`. --max-env-calls and -usd are limits of the whole server."""

    agent: str = setting("", "run or model folder, hub id or mini (default: newest mini run)", everyday=True)
    env: str = setting("", "environment (default: that of the agent's training)", everyday=True)
    host: str = setting("127.0.0.1", "address to listen at", everyday=True)
    port: int = setting(8000, "port; 0: any free one", range=Range(at_least=0, below=65536), everyday=True)
    model_name: str = setting("prompt-r1", "name of the pair in /v1/models and in requests", everyday=True)
    max_sessions: int = setting(
        64, "most questions at the same time; others get status 429", range=POSITIVE, everyday=True
    )
    request_calls: int = setting(
        0, "most calls of the environment for a question; 0: no limit", range=NOT_NEGATIVE, everyday=True
    )
    request_usd: float = setting(
        0.0, "most dollars of a question (needs --env-price); 0: no limit", range=NOT_NEGATIVE, everyday=True
    )
    request_seconds: float = setting(300.0, "most seconds of a question", range=POSITIVE, everyday=True)
    seed: int = setting(-1, "mini world and sampling (default: the run's)", everyday=True)
    temperature: float = setting(0.0, "of the agent, unless a request has its own", range=NOT_NEGATIVE)
    device: str = setting("auto", "auto, cpu or cuda")
