"""Open environments by `--env SPEC`: one or several names, separated by commas.

A new form of name goes to `form_of_name` and `find_source`.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from prompt_r1.programs.reading import is_finite_number
from prompt_r1.settings.agent import HUGGING_FACE_PREFIX, MINI, SMOLLM2, EnvironmentConfig, names_of
from prompt_r1.settings.functions import OBJECT_PREFIX, import_object

if TYPE_CHECKING:  # torch is not imported here, so that a wrong SPEC is reported at once.
    import torch

# How the environments of this package are made, with the seed of the run. An agent without an environment
# ("none") answers at once, and asks nothing.
MINI_ENVIRONMENTS: Mapping[str, Callable[[int], Answering]] = {
    MINI: lambda seed: MiniEnvironment(seed=seed),
    "mini-b": lambda seed: MiniEnvironmentB(seed=seed),
    "mini-mute": lambda seed: MuteEnvironment(),
}
BUILT_IN: Mapping[str, Callable[[int], Answering]] = {
    **MINI_ENVIRONMENTS,
    "none": lambda seed: MuteEnvironment(),
}
NameForm = Literal["object", "local", "url", "model"]
Opener = Callable[[int, "torch.device"], Source]
"""Opens a source, with the seed of the run and the device of the models in this process."""
# The fields of --env-args that a local model takes, and their defaults.
LOCAL_FIELDS: Mapping[str, float] = {"max_tokens": 1024, "temperature": 0.0}
RESERVED_FIELDS = ("model", "messages", "stream", "n")  # fields of a request that users may not set


def form_of_name(name: str) -> NameForm:
    """The form of a name. It decides what environment the name stands for.

    BUILT_IN                         object     an object with `ask`, part of this package
    py:MODULE:NAME                   object     an object of the user with `ask` (own.py)
    hf:DIR, hf:FILE.gguf, smollm2    local      a Hugging Face model in this process (local.py)
    MODEL@http://host:port/v1        url        a model behind an OpenAI-compatible endpoint (endpoint.py)
    MODEL                            model      a model at OPENAI_BASE_URL (default: OpenAI)
    """
    if name in BUILT_IN or name.startswith(OBJECT_PREFIX):
        return "object"
    if name == SMOLLM2 or name.startswith(HUGGING_FACE_PREFIX):
        return "local"
    return "url" if "@http" in name else "model"


def is_mini(spec: str) -> bool:
    """Whether an environment is or includes the mini world, in this process or behind an endpoint."""
    return any(part.split("@")[0] in MINI_ENVIRONMENTS for part in names_of(spec))


def trusted_names(*, typed: Iterable[str], opened: Iterable[str]) -> Collection[str]:
    """The names that the user trusts.

    `typed` has the SPECs on the command line, and `opened` all SPECs that the run opens.
    A SPEC in a file may come from anyone, so only names on the command line are trusted:

        py:MODULE:NAME   is imported only if it is trusted
        MODEL@URL        gets OPENAI_API_KEY only if it is trusted
        MODEL            always gets OPENAI_API_KEY. In a run that opens a MODEL, the key is for the provider
                         of that model, so no URL gets it
    """
    trusted = _names_in(typed)
    if any(form_of_name(name) == "model" for name in _names_in(opened)):
        trusted = {name for name in trusted if form_of_name(name) != "url"}
    return trusted


def _names_in(specs: Iterable[str]) -> set[str]:
    return {name for spec in specs for name in names_of(spec) if name}


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
        max_calls=config.max_env_calls, max_usd=config.max_env_usd, charged=journal.charged, ranks=ranks
    )
    return Account(journal, budget)


@dataclass(frozen=True)
class CheckedSource:
    """What one name stands for. `open` is called later, in each rank.

    A training forks its ranks after the check, and they may not share an object of the user.
    """

    open: Opener
    price: Price
    reply_limit: int | None  # the most tokens of a reply; None: nothing limits them


@dataclass(frozen=True)
class CheckedEnvironment:
    """An environment that was checked with its settings. `open_environment` opens it, once."""

    config: EnvironmentConfig
    sources: Sequence[CheckedSource]

    def check_usd_limit(self, flag: str) -> None:
        """Raise UsageError if the limit of dollars that `flag` names cannot be kept."""
        check_usd_limit(flag, [(source.price, source.reply_limit) for source in self.sources])


def check_environment(
    env: str | Answering,
    config: EnvironmentConfig,
    *,
    trusted: Collection[str] = (),
    prices: Mapping[str, Price] | None = None,
    fields: Mapping[str, object] | None = None,
) -> CheckedEnvironment:
    """Check an environment with its settings, before it is opened. `env` is a SPEC, or a user's object.

    `trusted` has the names that the user trusts (`trusted_names`). `prices`, by the names of environments,
    replaces --env-price, and `fields` of the requests replace --env-args. Raises UsageError for wrong
    settings, for names that stand for no environment, and for a server of this machine that does not listen.

    Nothing here imports torch or loads a model. So the programs call this function first, to report an error
    at once.
    """
    if fields is None:
        fields = parse_fields(config.env_args)
    if isinstance(env, str):
        names = names_of(env)
        if prices is None:
            prices = parse_prices(config.env_price, names)
        sources = [find_source(name, config, fields, trusted, prices[name]) for name in names]
    else:
        prices = parse_prices(config.env_price, ["env"])
        sources = [_source_of_object(lambda seed: env, fields, prices["env"])]
    Route(config.route, len(sources))  # This raises UsageError for a wrong route.
    checked = CheckedEnvironment(config, sources)
    if config.max_env_usd:
        is_free = all(source.price == FREE for source in sources)
        some_environment_has_a_price = any(price != FREE for price in prices.values())
        # An evaluation may ask a free environment and others. Then the limit of dollars is for the others.
        limit_is_for_others = is_free and some_environment_has_a_price
        if not limit_is_for_others:
            checked.check_usd_limit("--max-env-usd")
    return checked


def find_source(
    name: str, config: EnvironmentConfig, fields: Mapping[str, object], trusted: Collection[str], price: Price
) -> CheckedSource:
    """Find what a name stands for. Raises UsageError if it cannot be opened."""
    form = form_of_name(name)
    if form == "object":
        make = BUILT_IN[name] if name in BUILT_IN else _import(name, trusted)
        return _source_of_object(make, fields, price, name=name)
    if form == "local":
        _check_model_of(name)
        local_fields = fields_of_local_model(name, fields)

        def open_local(seed: int, device: "torch.device") -> Source:
            from prompt_r1.environments.local import load_local  # It imports torch.

            return load_local(
                name,
                fields=local_fields,
                system=config.env_system,
                seed=seed,
                slots=config.env_concurrency,
                device=device,
            )

        return CheckedSource(open_local, price, limit_in(local_fields))

    from prompt_r1.environments.endpoint import endpoint_of  # Other environments need no HTTP.

    gets_key = form == "model" or name in trusted
    key = os.environ.get("OPENAI_API_KEY", "") if gets_key else ""
    endpoint = endpoint_of(name, key=key, fields=fields, system=config.env_system)
    endpoint.check_listening()
    return CheckedSource(lambda seed, device: endpoint, price, endpoint.reply_limit)


def _source_of_object(
    make: Callable[[int], Any], fields: Mapping[str, object], price: Price, *, name: str = ""
) -> CheckedSource:
    """An object with `ask` as a source. `make` returns the object, for the seed of the run."""
    reply_limit = limit_in(fields)

    def open_object(seed: int, device: "torch.device") -> Source:
        return OwnSource(make(seed), seed=seed, name=name, priced=price != FREE, reply_limit=reply_limit)

    return CheckedSource(open_object, price, reply_limit)


def _import(name: str, trusted: Collection[str]) -> Callable[[int], Any]:
    """Import the object or the class that py:MODULE:NAME stands for. Importing it runs the user's code."""
    if name not in trusted:
        raise UsageError(f"a file names {name!r}, which runs code: give it as --env")
    own = import_object(name.removeprefix(OBJECT_PREFIX), where=f"the environment {name!r}")
    return lambda seed: own


def _check_model_of(name: str) -> None:
    """Raise UsageError if there is no model to load for hf:DIR, hf:FILE.gguf or smollm2."""
    folder = name.removeprefix(HUGGING_FACE_PREFIX)
    if is_gguf(folder):
        gguf_file(folder)  # This raises UsageError if the file cannot be used.
    elif not (Path(folder) / "config.json").exists():
        raise UsageError(f"the environment {name!r}: there is no Hugging Face model in {folder!r}")


def open_environment(
    checked: CheckedEnvironment, *, seed: int, device: "torch.device", account: Account | None = None
) -> Environment:
    """Open a checked environment. The caller closes it.

    `seed` is the seed of the mini world, of the user's objects, and of local models, which are on `device`.
    Without an account, calls are not recorded.
    """
    config = checked.config
    account = account or open_account(config)
    return Environment(
        [source.open(seed, device) for source in checked.sources],
        journal=account.journal,
        budget=account.budget,
        prices=[source.price for source in checked.sources],
        route=config.route,
        concurrency=config.env_concurrency,
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


def fields_of_local_model(name: str, given: Mapping[str, object]) -> dict[str, float]:
    """The fields of --env-args, or their defaults, for a local model. Raises UsageError for any others."""
    fields = {**LOCAL_FIELDS, **given}
    max_tokens, temperature = fields["max_tokens"], fields["temperature"]
    wrong = UsageError(
        f"--env-args for {name} takes max_tokens (at least 1) and temperature (at least 0), not {dict(given)}"
    )
    if fields.keys() != LOCAL_FIELDS.keys():
        raise wrong
    if type(max_tokens) is not int or max_tokens < 1:
        raise wrong
    if not is_finite_number(temperature) or temperature < 0:
        raise wrong
    return {"max_tokens": max_tokens, "temperature": temperature}
