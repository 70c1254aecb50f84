"""Open environments by `--env SPEC`: one or several names, separated by commas.

A new form of name goes to `form_of_name`, `check_environment` and `_open_source`.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prompt_r1.environments.budget import FREE, Budget, Price, check_usd_limit, parse_prices
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.own import Answering, MuteEnvironment, OwnSource
from prompt_r1.environments.route import Route
from prompt_r1.environments.sources import Source, limit_in
from prompt_r1.errors import UsageError
from prompt_r1.miniworld.environment import MiniEnvironment, MiniEnvironmentB
from prompt_r1.model.gguf import gguf_file, is_gguf
from prompt_r1.settings.agent import SMOLLM2, EnvironmentConfig
from prompt_r1.settings.functions import OBJECT_PREFIX, import_object

if TYPE_CHECKING:  # torch is not imported here, so that a wrong SPEC is reported at once.
    import torch

    from prompt_r1.environments.endpoint import Endpoint

BUILT_IN: Mapping[str, type[Answering]] = {
    "mini": MiniEnvironment,
    "mini-b": MiniEnvironmentB,
    "mini-mute": MuteEnvironment,
    "none": MuteEnvironment,  # An agent without an environment answers at once, and asks nothing.
}
NameForm = Literal["built-in", "local", "own", "url", "model"]
RESERVED_FIELDS = ("model", "messages", "stream", "n")  # fields of a request that users may not set


def form_of_name(name: str) -> NameForm:
    """The form of a name. It decides what environment the name stands for.

    BUILT_IN                         built-in   part of this package
    hf:DIR, hf:FILE.gguf, smollm2    local      a Hugging Face model in this process
    py:MODULE:NAME                   own        an object of the user with `ask` (own.py)
    MODEL@http://host:port/v1        url        a model behind an OpenAI-compatible endpoint
    MODEL                            model      a model at OPENAI_BASE_URL (default: OpenAI)
    """
    if name in BUILT_IN:
        return "built-in"
    if name == SMOLLM2 or name.startswith("hf:"):
        return "local"
    if name.startswith(OBJECT_PREFIX):
        return "own"
    return "url" if "@http" in name else "model"


def trusted_names(*, typed: Iterable[str], opened: Iterable[str]) -> Collection[str]:
    """The names that the user trusts. `typed` are the SPECs on the command line, `opened` all of the run.

    A SPEC in a file may come from anyone, so only names on the command line are trusted:

        py:MODULE:NAME  is imported if it is trusted
        MODEL@URL       gets OPENAI_API_KEY if it is trusted, unless the run also opens a MODEL without URL.
                        Then the key belongs to that one, which always gets it
    """
    trusted = _names_in(typed)
    if any(form_of_name(name) == "model" for name in _names_in(opened)):
        trusted = {name for name in trusted if form_of_name(name) != "url"}
    return trusted


def _names_in(specs: Iterable[str]) -> set[str]:
    return {name for spec in specs for name in spec.split(",") if name}


@dataclass(frozen=True)
class Account:
    """The journal and the budget that all environments of a run share."""

    journal: Journal
    budget: Budget


def open_account(
    config: EnvironmentConfig, folder: Path | None = None, *, rank: int = 0, ranks: int = 1
) -> Account:
    """Open the journal in `folder` (None: nothing is recorded), and a budget that knows what it has spent."""
    journal = Journal(folder / "journal" if folder else None, rank=rank)
    budget = Budget(
        max_calls=config.max_env_calls, max_usd=config.max_env_usd, spent=journal.spent, ranks=ranks
    )
    return Account(journal, budget)


def check_usd_limit_of(
    flag: str, spec: str, config: EnvironmentConfig, prices: Mapping[str, Price] | None = None
) -> None:
    """Raise UsageError if a limit of dollars cannot be kept with the environments of a SPEC.

    `flag` names the limit, and `prices`, by the names of environments, replaces --env-price.
    """
    names = spec.split(",")
    prices = parse_prices(config.env_price, names) if prices is None else prices
    limit = limit_in(parse_fields(config.env_args))
    # The replies of a local model always have a limit, so it is left out.
    reply_limits = [limit for name in names if prices[name] != FREE and form_of_name(name) != "local"]
    check_usd_limit(flag, prices.values(), reply_limits)


def check_environment(
    spec: str,
    config: EnvironmentConfig,
    *,
    trusted: Collection[str],
    prices: Mapping[str, Price] | None = None,
) -> None:
    """Raise UsageError for wrong settings, for names that stand for no environment, and for a dead server.

    `prices`, by the names of environments, replaces --env-price. Nothing here imports torch or loads a model,
    so the user hears of an error at once. Of the servers, only those of this machine are tried.
    """
    names = spec.split(",")
    parse_fields(config.env_args)
    if prices is None:
        prices = parse_prices(config.env_price, names)
    if config.max_env_usd:
        check_usd_limit_of("--max-env-usd", spec, config, prices)
    Route(config.route, len(names))  # This raises UsageError for a wrong route.
    for name in names:
        match form_of_name(name):
            case "own":
                _import(name, trusted)
            case "local":
                _check_model_of(name)
            case "url" | "model":
                _endpoint(name, config, trusted).check_listening()


def open_environment(
    spec: str,
    config: EnvironmentConfig,
    *,
    trusted: Collection[str] = (),
    account: Account | None = None,
    seed: int = 0,
    device: "torch.device | None" = None,
    prices: Mapping[str, Price] | None = None,
) -> Environment:
    """Open the environments of a SPEC. The caller closes them.

    `seed` is the seed of the mini world, of the user's objects, and of local models, which are on `device`.
    `prices`, by the names of environments, replaces --env-price. Raises UsageError for a SPEC that cannot be
    opened with these settings.
    """
    # All names are checked before the first model is loaded.
    check_environment(spec, config, trusted=trusted, prices=prices)
    names = spec.split(",")
    price_of = parse_prices(config.env_price, names) if prices is None else prices
    account = account or open_account(config)
    sources = [
        _open_source(name, config, trusted, price=price_of[name], seed=seed, device=device) for name in names
    ]
    return Environment(
        sources,
        journal=account.journal,
        budget=account.budget,
        prices=[price_of[name] for name in names],
        route=config.route,
        concurrency=config.env_concurrency,
    )


def open_own(own: Answering, config: EnvironmentConfig, *, seed: int) -> Environment:
    """Open an object of the user that is given as such, and not by a SPEC. Nothing is recorded."""
    [price] = parse_prices(config.env_price, ["env"]).values()
    source = _own_source(own, config, price=price, seed=seed)
    if config.max_env_usd:
        check_usd_limit("--max-env-usd", [price], [source.reply_limit])
    budget = Budget(max_calls=config.max_env_calls, max_usd=config.max_env_usd)
    return Environment([source], budget=budget, prices=[price], concurrency=config.env_concurrency)


def _open_source(
    name: str,
    config: EnvironmentConfig,
    trusted: Collection[str],
    *,
    price: Price,
    seed: int,
    device: "torch.device | None",
) -> Source:
    """Open the source of a name that `check_environment` has accepted."""
    match form_of_name(name):
        case "built-in":
            return _own_source(BUILT_IN[name], config, name=name, price=price, seed=seed)
        case "own":
            return _own_source(_import(name, trusted), config, name=name, price=price, seed=seed)
        case "local":
            from prompt_r1.environments.local import load_local

            assert device is not None, f"{name} needs a device"
            return load_local(
                name,
                fields=parse_fields(config.env_args),
                system=config.env_system,
                seed=seed,
                slots=config.env_concurrency,
                device=device,
            )
        case "url" | "model":
            return _endpoint(name, config, trusted)


def _own_source(own: Any, config: EnvironmentConfig, *, price: Price, seed: int, name: str = "") -> OwnSource:
    """The source that asks an object with `ask`, or an object of a class with `ask`."""
    return OwnSource(
        own, seed=seed, name=name, priced=price != FREE, reply_limit=limit_in(parse_fields(config.env_args))
    )


def _import(name: str, trusted: Collection[str]) -> Any:
    """The object or the class that py:MODULE:NAME stands for. Importing it runs the user's code."""
    if name not in trusted:
        raise UsageError(f"a file names {name!r}, which runs code: give it as --env")
    return import_object(name.removeprefix(OBJECT_PREFIX), where=f"the environment {name!r}")


def _check_model_of(name: str) -> None:
    """Raise UsageError if there is no model to load for hf:DIR, hf:FILE.gguf or smollm2."""
    folder = name.removeprefix("hf:")
    if is_gguf(folder):
        gguf_file(folder)  # This raises UsageError if the file cannot be used.
    elif not (Path(folder) / "config.json").exists():
        raise UsageError(f"the environment {name!r}: there is no Hugging Face model in {folder!r}")


def _endpoint(name: str, config: EnvironmentConfig, trusted: Collection[str]) -> "Endpoint":
    """The endpoint of a name. Raises UsageError for a malformed name, and for a key that cannot be used."""
    # It is imported here, because other environments need no HTTP.
    from prompt_r1.environments.endpoint import endpoint_of

    gets_key = form_of_name(name) == "model" or name in trusted
    return endpoint_of(
        name,
        key=os.environ.get("OPENAI_API_KEY", "") if gets_key else "",
        fields=parse_fields(config.env_args),
        system=config.env_system,
    )


def parse_fields(text: str) -> dict[str, object]:
    """Parse --env-args, the JSON object of extra fields of each request."""
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
