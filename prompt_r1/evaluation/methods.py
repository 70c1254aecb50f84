"""The methods of a comparison. The row of a method says how it is made, what it costs, and what it needs.

This file does not import torch, so that a wrong command line is reported at once.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from prompt_r1.evaluation.ask_once import ReadyMethod, direct, think_then_answer
from prompt_r1.evaluation.gepa import GEPA
from prompt_r1.evaluation.opro import OPRO
from prompt_r1.evaluation.searches import Algorithm, RequestFields
from prompt_r1.evaluation.textgrad import TEXTGRAD
from prompt_r1.types import Spending

if TYPE_CHECKING:  # These modules import torch.
    from prompt_r1.evaluation.dry_run import Costs
    from prompt_r1.evaluation.making import Maker


@dataclass(frozen=True)
class Method:
    """How a method is made, what it costs, and what it needs."""

    make: "Callable[[Maker], Awaitable[ReadyMethod]]"
    cost: "Callable[[Costs], Spending]" = lambda costs: Spending()  # of its answers and its preparation
    needs_environment: bool = True
    # Which agent plays: none (""), the agent of --agent, the agent before its training, or --grpo-agent.
    agent: Literal["", "trained", "start", "grpo"] = ""
    needs_training: bool = False  # whether training questions prepare the method
    needs_validation: bool = False  # whether validation questions select what was prepared
    algorithm: Algorithm | None = None  # how the method searches for a prompt
    fields: RequestFields = field(default_factory=dict)  # fields of each request; they win over --env-args


def search(algorithm: Algorithm, *, needs_validation: bool) -> Method:
    """The row of a method that searches for a prompt."""
    return Method(
        lambda maker: maker.search(algorithm),
        lambda costs: costs.search(algorithm),
        needs_training=True,
        needs_validation=needs_validation,
        algorithm=algorithm,
        fields=algorithm.fields,
    )


METHODS: dict[str, Method] = {
    "direct": Method(lambda maker: maker.ask(direct), lambda costs: costs.direct()),
    "cot": Method(
        lambda maker: maker.ask(think_then_answer), lambda costs: costs.cot(), fields={"temperature": 0.0}
    ),
    "opro": search(OPRO, needs_validation=False),
    "textgrad": search(TEXTGRAD, needs_validation=True),
    "gepa": search(GEPA, needs_validation=True),
    "sft": Method(lambda maker: maker.sft(), needs_environment=False, agent="start", needs_training=True),
    "grpo-only": Method(lambda maker: maker.as_it_is(), needs_environment=False, agent="grpo"),
    "untrained": Method(lambda maker: maker.untrained(), lambda costs: costs.games(), agent="start"),
    "bc": Method(lambda maker: maker.bc(), lambda costs: costs.games(), agent="start"),
    "rft": Method(lambda maker: maker.rft(), lambda costs: costs.rft(), agent="start", needs_training=True),
    "agent-only": Method(lambda maker: maker.as_it_is(), needs_environment=False, agent="trained"),
    "prompt-r1": Method(lambda maker: maker.as_it_is(), lambda costs: costs.games(), agent="trained"),
}
DEFAULT_METHODS = ("direct", "untrained", "prompt-r1")  # compared without --method and --tables
TRANSFER_METHODS = ("direct", "prompt-r1")  # --tables compares them with all environments and agents.
EXTRA_METHODS = ("bc", "rft")  # not in the paper, so --tables leaves them out
