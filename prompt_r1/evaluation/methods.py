"""The methods of a comparison, and what each needs. `making.make_method` makes them.

This file does not import torch, so that a wrong command line is reported at once.
"""

from dataclasses import dataclass, field
from typing import Literal

from prompt_r1.evaluation.gepa import GEPA
from prompt_r1.evaluation.opro import OPRO
from prompt_r1.evaluation.searches import Algorithm, RequestFields
from prompt_r1.evaluation.textgrad import TEXTGRAD


@dataclass(frozen=True)
class Method:
    """What a method needs to answer."""

    needs_environment: bool = True
    # Which agent plays: none (""), the agent of --agent, the agent before its training, or --grpo-agent.
    agent: Literal["", "trained", "start", "grpo"] = ""
    needs_training: bool = False  # whether training questions prepare the method
    needs_validation: bool = False  # whether validation questions select what was prepared
    algorithm: Algorithm | None = None  # how the method searches for a prompt
    fields: RequestFields = field(default_factory=dict)  # fields of each request; they win over --env-args


METHODS: dict[str, Method] = {
    "direct": Method(),
    "cot": Method(fields={"temperature": 0.0}),
    "opro": Method(algorithm=OPRO, needs_training=True, fields=OPRO.fields),
    "textgrad": Method(
        algorithm=TEXTGRAD, needs_training=True, needs_validation=True, fields=TEXTGRAD.fields
    ),
    "gepa": Method(algorithm=GEPA, needs_training=True, needs_validation=True, fields=GEPA.fields),
    "sft": Method(needs_environment=False, agent="start", needs_training=True),
    "grpo-only": Method(needs_environment=False, agent="grpo"),
    "untrained": Method(agent="start"),
    "bc": Method(agent="start"),
    "rft": Method(agent="start", needs_training=True),
    "agent-only": Method(needs_environment=False, agent="trained"),
    "prompt-r1": Method(agent="trained"),
}
DEFAULT_METHODS = ("direct", "untrained", "prompt-r1")  # compared without --method and --tables
TRANSFER_METHODS = ("direct", "prompt-r1")  # --tables compares them with all environments and agents.
EXTRA_METHODS = ("bc", "rft")  # not in the paper, so --tables leaves them out
