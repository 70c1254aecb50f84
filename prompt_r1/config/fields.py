"""What a setting is: its default, help line, range, and what depends on it. Settings shared by programs."""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from prompt_r1.errors import UsageError


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    above: float | None = None,
    at_least: float | None = None,
    identifies: bool = False,
    group: str = "",
) -> Any:
    """A field of a config: its default, its line in the help, and the values it takes.

    `identifies`: with another value it is another experiment, so a resumed run must have the same one, and
    answers of an evaluation are reused only with the same one. `group` is the heading, in --help-all, of this
    field and those that follow it.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "above": above,
        "at_least": at_least,
        "identifies": identifies,
        "group": group,
    }
    return field(default=default, metadata=metadata)


def check_ranges(config: Any) -> None:
    """Raise UsageError for a value outside of its field's range or choices."""
    for f in fields(config):
        value, flag = getattr(config, f.name), "--" + f.name.replace("_", "-")
        above, at_least, choices = (f.metadata[name] for name in ("above", "at_least", "choices"))
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{flag} must be a finite number, not {value}")
        if above is not None and not value > above:
            raise UsageError(f"{flag} must be above {above:g}, not {value}")
        if at_least is not None and not value >= at_least:
            none = " (none)" if at_least == 0 else ""
            raise UsageError(f"{flag} must be {at_least:g}{none} or more, not {value}")
        if choices and isinstance(value, str) and value not in choices:
            raise UsageError(f"{f.name} must be one of {', '.join(choices)}, not {value!r}")


def identifying_values(config: Any) -> dict[str, Any]:
    """The values of the fields that tell one experiment from another."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.metadata["identifies"]}


@dataclass(frozen=True)
class ServedConfig:
    """An agent behind an endpoint, --agent MODEL@URL, which plays but is not trained."""

    agent_tokenizer: str = setting(
        "", "what a served agent is: run folder, model folder or hub id (its MODEL)"
    )
    agent_prompts: str = setting("tokens", "what a served agent is sent", choices=("tokens", "text"))


@dataclass(frozen=True)
class EnvironmentConfig:
    """How an environment is called, limited, paid for and recorded, in training and in evaluation."""

    env_concurrency: int = setting(
        64, "concurrent calls of the environment, on each rank", above=0, group="calls of the environment"
    )
    env_args: str = setting("", 'fields of each request, as JSON: {"temperature": 0.7}', identifies=True)
    route: str = setting(
        "session", "among several environments: session, uniform or weights (3,1)", identifies=True
    )
    env_timeout: float = setting(120.0, "seconds that one attempt of a call may take", above=0)
    env_rpm: float = setting(0.0, "requests per minute at most, on each rank; 0: no limit", at_least=0)
    env_tpm: float = setting(0.0, "tokens per minute at most, on each rank; 0: no limit", at_least=0)
    env_price: tuple[str, ...] = setting(
        (), "IN,OUT in dollars per million tokens, for all environments or each"
    )
    max_env_calls: int = setting(0, "most calls of the run; 0: no limit", at_least=0)
    max_env_tokens: int = setting(0, "most tokens of the run, sent and received; 0: no limit", at_least=0)
    max_env_usd: float = setting(0.0, "most dollars of the run (needs --env-price); 0: no limit", at_least=0)
    journal: str = setting(
        "reuse",
        "recorded calls: live: send again; reuse; replay: send nothing",
        choices=("live", "reuse", "replay"),
    )
    journal_from: tuple[str, ...] = setting((), "journals of other runs whose replies may be used")
