"""Open environments by `--env SPEC`. A new kind of name begins in `kind_of`."""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prompt_r1.environments.budget import FREE, Budget, Price, parse_price, parse_prices
from prompt_r1.environments.environment import Environment, parse_weights
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.sources import Answering, MuteEnvironment, OwnSource, Source, limit_in
from prompt_r1.errors import UsageError
from prompt_r1.model.gguf import gguf_file, is_gguf
from prompt_r1.settings.agent import MINI_ENVIRONMENTS, SMOLLM2, EnvironmentConfig
from prompt_r1.settings.functions import OBJECT_PREFIX, import_object

if TYPE_CHECKING:  # torch is not imported here, so that a wrong SPEC is reported at once.
    import torch

BUILT_IN = (*MINI_ENVIRONMENTS, "none")  # With `none`, an agent answers alone, and asks nothing.
Kind = Literal["built-in", "local", "own", "url", "model"]
RESERVED_FIELDS = ("model", "messages", "stream", "n")  # fields of a request that users may not set


def kind_of(name: str) -> Kind:
    """The kind of environment that a name stands for.

    The form of the name decides:

        BUILT_IN                         built-in   part of this package
        hf:DIR, hf:FILE.gguf, smollm2    local      a Hugging Face model in this process
        py:MODULE:NAME                   own        an object of the user with `ask` (sources.py)
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


def check_usd_limit(flag: str, config: EnvironmentConfig) -> None:
    """Raise UsageError if a limit of dollars cannot be kept with these settings; `flag` names the limit."""
    if not any(config.env_price):
        raise UsageError(f"{flag} needs --env-price IN,OUT: without a price, dollars are not counted")
    if limit_in(parse_fields(config.env_args)) is None:
        raise UsageError(
            f"{flag} needs a limit of each reply, such as --env-args '{{\"max_tokens\": 1024}}': without it, "
            "nobody knows what the next call will cost"
        )


def check_environment(
    spec: str, config: EnvironmentConfig, *, typed: Collection[str], others: Collection[str] = ()
) -> None:
    """Raise UsageError for what is wrong with a SPEC and its settings, before anything is loaded.

    For `typed` and `others`, see `open_environment`.
    """
    if config.max_env_usd:
        check_usd_limit("--max-env-usd", config)
    for price in config.env_price:
        parse_price(price)
    names = spec.split(",")
    parse_weights(config.route, len(names))
    with_key = _names_with_key([spec, *others], typed)
    fields = parse_fields(config.env_args)
    for name in names:
        _check_name(name, typed)
        kind = kind_of(name)
        if kind in ("url", "model"):
            _endpoint(name, config, key=_key_for(name, with_key), fields=fields)
        if kind == "url":
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
    prices: Mapping[str, Price] | None = None,
) -> Environment:
    """Open the environments of a SPEC, which is one or several names (see `kind_of`), separated by commas.

    `typed` are the SPECs that the user typed on the command line. A SPEC that is read from a file may come
    from anyone: its object is not imported, and its URL does not get OPENAI_API_KEY. `others` are the SPECs
    that the run opens besides this SPEC: if a MODEL without URL is among them, no URL gets the key.

    `seed` is the seed of the mini world, of the user's objects, and of local models, which are on `device`.
    `prices`, by the names of environments, replaces --env-price. The caller closes the environment. Raises
    UsageError.
    """
    if config.max_env_usd:
        check_usd_limit("--max-env-usd", config)
    fields = parse_fields(config.env_args)
    with_key = _names_with_key([spec, *others], typed)
    names = spec.split(",")
    price_of = parse_prices(config.env_price, names) if prices is None else prices
    for name in names:  # All names are checked before the first model is loaded.
        _check_name(name, typed)
    sources = [
        _open_source(
            name,
            config,
            key=_key_for(name, with_key),
            fields=fields,
            seed=seed,
            device=device,
            priced=price_of[name] != FREE,
        )
        for name in names
    ]
    account = account or open_account(config)
    return Environment(
        sources,
        journal=account.journal,
        budget=account.budget,
        prices=[price_of[name] for name in names],
        route=config.route,
    )


def open_own(own: Answering, config: EnvironmentConfig, *, seed: int) -> Environment:
    """Open an object of the user that is given as such, and not by a SPEC. Nothing is recorded."""
    if config.max_env_usd:
        check_usd_limit("--max-env-usd", config)
    [price] = parse_prices(config.env_price, ["env"]).values()
    limit = limit_in(parse_fields(config.env_args))
    source = OwnSource(own, seed=seed, priced=price != FREE, reply_limit=limit)
    return Environment([source], budget=open_account(config).budget, prices=[price])


def _check_name(name: str, typed: Collection[str]) -> None:
    """Raise UsageError for a name that stands for no environment. No model is loaded."""
    match kind_of(name):
        case "local":
            folder = name.removeprefix("hf:")
            if is_gguf(folder):
                gguf_file(folder)  # This raises UsageError if the file cannot be used.
            elif not (Path(folder) / "config.json").exists():
                raise UsageError(f"the environment {name!r}: there is no Hugging Face model in {folder!r}")
        case "own":
            if name not in _names(typed):
                raise UsageError(f"a file names {name!r}, which runs code: give it as --env")
            _own_object(name)
        case "model" if name.startswith("mini-") and "@" not in name:
            raise UsageError(
                f"there is no environment {name!r}: the mini world has {', '.join(MINI_ENVIRONMENTS)}"
            )


def _open_source(
    name: str,
    config: EnvironmentConfig,
    *,
    key: str,
    fields: Mapping[str, object],
    seed: int,
    device: "torch.device | None",
    priced: bool,
) -> Source:
    """Open an environment whose name `_check_name` has accepted. Raises UsageError."""
    match kind_of(name):
        case "built-in":
            own: Any = _built_in(name)
            return OwnSource(own, seed=seed, name=name, priced=priced, reply_limit=limit_in(fields))
        case "own":
            own = _own_object(name)
            return OwnSource(own, seed=seed, name=name, priced=priced, reply_limit=limit_in(fields))
        case "local":
            from prompt_r1.environments.local import load_local

            assert device is not None, f"{name} needs a device"
            system, slots = config.env_system, config.env_concurrency
            return load_local(name, fields=fields, system=system, seed=seed, slots=slots, device=device)
        case "url" | "model":
            return _endpoint(name, config, key=key, fields=fields)


def _endpoint(name: str, config: EnvironmentConfig, *, key: str, fields: Mapping[str, object]) -> Source:
    """The endpoint of a name. It connects at its first request. Raises UsageError."""
    # It is imported here, because other environments need no HTTP.
    from prompt_r1.environments.endpoint import endpoint_of

    system, concurrency = config.env_system, config.env_concurrency
    return endpoint_of(name, key=key, fields=fields, system=system, concurrency=concurrency)


def _own_object(name: str) -> Any:
    """The user's object py:MODULE:NAME. Importing it runs the user's code. Raises UsageError."""
    return import_object(name.removeprefix(OBJECT_PREFIX), where=f"the environment {name!r}")


def _built_in(name: str) -> type[Answering]:
    """The class of an environment that comes with the package."""
    # The mini world is imported here, because `--help` does not need it.
    from prompt_r1.miniworld.environment import MiniEnvironment, MiniEnvironmentB

    if name == "mini":
        return MiniEnvironment
    if name == "mini-b":
        return MiniEnvironmentB
    return MuteEnvironment  # mini-mute and none


def _names(specs: Collection[str]) -> set[str]:
    """The names in SPECs."""
    return {name for spec in specs for name in spec.split(",") if name}


def _names_with_key(specs: Collection[str], typed: Collection[str]) -> set[str]:
    """The names that OPENAI_API_KEY is sent to.

    If a run opens any MODEL without URL, only these MODELs get the key. Otherwise the URLs that the user
    typed get it.
    """
    models = {name for name in _names(specs) if kind_of(name) == "model"}
    return models or {name for name in _names(typed) if kind_of(name) == "url"}


def _key_for(name: str, with_key: Collection[str]) -> str:
    """OPENAI_API_KEY, or an empty text if the key is not sent to this name."""
    return os.environ.get("OPENAI_API_KEY", "") if name in with_key else ""


def parse_fields(text: str) -> dict[str, object]:
    """Parse --env-args, the JSON object of extra fields of each request. Raises UsageError."""
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(
            f"--env-args is not JSON ({error}): write '{{\"temperature\": 0.7}}', with both kinds of quotes"
        ) from None
    if not isinstance(fields, dict):
        raise UsageError(f'--env-args takes a JSON object such as {{"temperature": 0.7}}, not {text!r}')
    for name in RESERVED_FIELDS:
        if name in fields:
            raise UsageError(f"--env-args may not set {name!r}")
    return fields
