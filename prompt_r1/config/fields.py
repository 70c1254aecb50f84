"""Fields of the settings: default, help line and range of each; and the settings that programs share."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from prompt_r1.errors import UsageError


@dataclass(frozen=True)
class Range:
    """The values that a numeric setting may take. None: no bound."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None


ANY = Range()
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
FRACTION = Range(at_least=0, below=1)  # [0, 1)
LEARNING_RATE = Range(above=0, below=1000)  # much larger ones overflow float32 inside AdamW


def setting(
    default: Any,
    help: str,
    *,
    range: Range = ANY,
    choices: tuple[str, ...] = (),
    everyday: bool = False,
    identifies: bool = False,
    group: str = "",
) -> Any:
    """A field of a config: its default, its line in the help, and the values it takes.

    `everyday` settings are shown by --help, the others only by --help-all, where `group` is the heading of
    this field and those that follow it. `identifies` marks a setting that defines the experiment: a resumed
    run must have the same value, and the answers of an evaluation are reused only with the same value.
    """
    metadata = {
        "help": help,
        "range": range,
        "choices": choices,
        "everyday": everyday,
        "identifies": identifies,
        "group": group,
    }
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def check_ranges(config: Any) -> None:
    """Raise UsageError for a value outside the range or the choices of its field."""
    for f in fields(config):
        value, flag, choices = getattr(config, f.name), flag_of(f.name), f.metadata["choices"]
        if isinstance(value, int | float):
            _check_number(flag, value, f.metadata["range"])
        if choices and isinstance(value, str) and value not in choices:
            raise UsageError(f"{flag} must be one of {', '.join(choices)}, not {value!r}")


def _check_number(flag: str, value: float, allowed: Range) -> None:
    if not math.isfinite(value):
        raise UsageError(f"{flag} must be a finite number, not {value}")
    if allowed.above is not None and not value > allowed.above:
        raise UsageError(f"{flag} must be above {allowed.above:g}, not {value}")
    if allowed.at_least is not None and not value >= allowed.at_least:
        none = " (none)" if allowed.at_least == 0 else ""
        raise UsageError(f"{flag} must be {allowed.at_least:g}{none} or more, not {value}")
    if allowed.below is not None and not value < allowed.below:
        raise UsageError(f"{flag} must be below {allowed.below:g}, not {value}")


def identifying_values(config: Any) -> dict[str, Any]:
    """The values of the fields that tell one experiment from another."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.metadata["identifies"]}


@dataclass(frozen=True)
class ServedConfig:
    """Settings of an agent behind an endpoint (--agent MODEL@URL), which can play but not be trained."""

    agent_tokenizer: str = setting(
        "",
        "tokenizer of a served agent: run folder, model folder or hub id (default: its MODEL)",
        group="agents behind an endpoint",
    )
    agent_prompts: str = setting(
        "tokens", "form of the prompts to a served agent", choices=("tokens", "text")
    )


@dataclass(frozen=True)
class CallConfig:
    """Settings of each call of the environment, shared by all programs."""

    env_args: str = setting(
        "",
        'fields of each request, as JSON: {"temperature": 0.7}',
        group="calls of the environment",
        identifies=True,
    )
    route: str = setting(
        "session", "choice among several environments: session, uniform or weights (3,1)", identifies=True
    )
    env_timeout: float = setting(120.0, "timeout of one attempt of a call, in seconds", range=POSITIVE)
    env_price: tuple[str, ...] = setting(
        (), "IN,OUT: dollars per million tokens, for all or each SPEC", everyday=True
    )


@dataclass(frozen=True)
class EnvironmentConfig(CallConfig):
    """Settings of the environment's rate limits, budget and journal, in training and in evaluation."""

    env_concurrency: int = setting(64, "concurrent calls on each rank", range=POSITIVE)
    env_rpm: float = setting(0.0, "most requests per minute on each rank; 0: no limit", range=NOT_NEGATIVE)
    env_tpm: float = setting(0.0, "most tokens per minute on each rank; 0: no limit", range=NOT_NEGATIVE)
    max_env_calls: int = setting(0, "most calls; 0: no limit", range=NOT_NEGATIVE)
    max_env_tokens: int = setting(0, "most tokens, sent and received; 0: no limit", range=NOT_NEGATIVE)
    max_env_usd: float = setting(
        0.0, "most dollars (needs --env-price); 0: no limit", range=NOT_NEGATIVE, everyday=True
    )
    journal: str = setting(
        "reuse",
        "recorded calls: live: send again; reuse; replay: send nothing",
        choices=("live", "reuse", "replay"),
    )
    journal_from: tuple[str, ...] = setting((), "journals of other runs whose replies may be reused")
