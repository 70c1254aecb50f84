"""The methods of a comparison, and what each of them needs.

These methods ask the environment each question without an agent:

    direct       the question itself, in one call
    cot          first for reasoning, and then for the answer that it leads to
    opro, textgrad, gepa
                 the question under a prompt, for which the method has searched

With the other methods, an agent plays a game of each question:

    prompt-r1    the trained agent
    untrained    the agent before training, in the same game (the paper's "w/o RL")
    agent-only   the trained agent in the same game without an environment ("w/o Env"). Every prompt gets the
                 same sentence in reply, so the answers show what the agent itself knows
    grpo-only    an agent that was trained without an environment (train.py --env none), in games of one turn
    sft          an agent that was fine-tuned on gold answers, in games of one turn
    bc, rft      an agent that was fine-tuned on games that ended right

`make_method` (making.py) makes a method, and `cost_of` (dry_run.py) estimates what it costs. This file does
not import torch, so that a wrong command line is reported at once.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from prompt_r1.environments.environment import Environment
from prompt_r1.evaluation.ask_once import direct, think_then_answer
from prompt_r1.evaluation.gepa import GEPA
from prompt_r1.evaluation.opro import OPRO
from prompt_r1.evaluation.predictions import Prediction, System
from prompt_r1.evaluation.searches import Algorithm, RequestFields
from prompt_r1.evaluation.textgrad import TEXTGRAD
from prompt_r1.types import Question

AskOnce = Callable[[Environment, System, Question, int], Awaitable[Prediction]]
"""Asks an environment a question for a system. The number is the question's repeat."""


@dataclass(frozen=True)
class Method:
    """How a method answers, and what it needs. It has an `ask`, an `algorithm` or an `agent`."""

    ask: AskOnce | None = None  # asks the environment without an agent, and without a search
    algorithm: Algorithm | None = None  # searches for the prompt of each dataset
    # "trained": the agent of --agent; "start": the model from which the training of this agent started;
    # "grpo": the agent of --grpo-agent.
    agent: Literal["trained", "start", "grpo"] | None = None
    # What the agent is fine-tuned on before it plays (imitation.py).
    fine_tuned_on: Literal["gold answers", "demonstrations", "own games"] | None = None
    needs_environment: bool = True
    needs_training: bool = False  # whether training questions prepare the method
    needs_validation: bool = False  # whether validation questions select what was prepared
    # Fields of each request to the environment, which win over --env-args.
    fields: RequestFields = field(default_factory=dict)
    in_paper: bool = True  # whether --tables compares it


METHODS: dict[str, Method] = {
    "direct": Method(direct),
    "cot": Method(think_then_answer, fields={"temperature": 0.0}),
    "opro": Method(algorithm=OPRO, needs_training=True, fields={"temperature": 0.0, "max_tokens": 1024}),
    "textgrad": Method(
        algorithm=TEXTGRAD,
        needs_training=True,
        needs_validation=True,
        fields={"temperature": 0.0, "max_tokens": 2000},
    ),
    "gepa": Method(algorithm=GEPA, needs_training=True, needs_validation=True),
    "sft": Method(agent="start", fine_tuned_on="gold answers", needs_environment=False, needs_training=True),
    "grpo-only": Method(agent="grpo", needs_environment=False),
    "untrained": Method(agent="start"),
    "bc": Method(agent="start", fine_tuned_on="demonstrations", in_paper=False),
    "rft": Method(agent="start", fine_tuned_on="own games", needs_training=True, in_paper=False),
    "agent-only": Method(agent="trained", needs_environment=False),
    "prompt-r1": Method(agent="trained"),
}
DEFAULT_METHODS = ("direct", "untrained", "prompt-r1")  # compared without --method and --tables
TRANSFER_METHODS = ("direct", "prompt-r1")  # --tables compares them with all environments and agents.
