"""The double-constrained reward of Prompt-R1 (paper, eqs 12-15): first the format, then the answer.

R_fmt = min(ε, α Σ_t M_t + β A_p + γ A_n + δ C_f)        (12)
R_ans = max over the gold answers of F1(answer, gold)    (13, 14)
R     = -ε + R_fmt + R_ans    if R_fmt = ε               (15)
        -ε + R_fmt            otherwise: the gate is shut

In a game without an answer, a lower cap replaces the ε of eq. 12.

M_t = 1   a turn whose think block and prompt block are not empty; the sum ends at T-1, because the
          prompt of the last turn is never sent
A_p = 1   an answer can be parsed
A_n = 1   the answer is not empty
C_f = 1   the last turn is a non-empty think block, an answer block and nothing else
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prompt_r1.f1 import f1
from prompt_r1.types import Reward, Trajectory, Turn

OwnReward = Callable[[Trajectory, Reward], float]
"""A user's own reward, which replaces R. It takes the game and its reward by eq. 15."""


@dataclass(frozen=True)
class Rule:
    """The coefficients of eq. 12."""

    alpha: float  # the reward of each turn with M_t = 1
    beta: float  # the reward of A_p
    gamma: float  # the reward of A_n
    delta: float  # the reward of C_f
    epsilon: float  # The format reward is capped here, and the gate opens when it is reached.
    unanswered_cap: float  # The cap for a game without an answer. It is below epsilon.


# The keys are the values of --rule. `unanswered_cap` is ours in both rules. It keeps the gate shut in a game
# without an answer, however many turns the game has.
RULES = {
    # The coefficients of Appendix G. The cap is 4 α: without an answer, the paper's five turns earn no more.
    "paper": Rule(alpha=0.25, beta=0.3, gamma=0.4, delta=0.3, epsilon=1.5, unanswered_cap=1.0),
    # The coefficients of the released code. There, three good turns open the gate without an answer. Here the
    # cap is ε - (β + γ + δ), which one good turn earns.
    "release": Rule(alpha=0.4, beta=0.25, gamma=0.25, delta=0.1, epsilon=1.0, unanswered_cap=0.4),
}
# Training without an environment (GRPO alone). The agent cannot ask, so α = 0. The other coefficients of
# "release" add up to 0.6. Here they are divided by 0.6, so that a perfect final turn reaches ε = 1.
RULE_WITHOUT_ENVIRONMENT = Rule(
    alpha=0.0, beta=0.25 / 0.6, gamma=0.25 / 0.6, delta=0.1 / 0.6, epsilon=1.0, unanswered_cap=0.0
)

TOLERANCE = 1e-9  # A sum of these floats may miss the cap by a rounding error.


def score_games(
    games: Sequence[Trajectory], *, rule: Rule, own: OwnReward | None = None
) -> list[Reward | None]:
    """The reward of each game; None for a game that the environment broke.

    A user's `own` reward replaces R, but neither R_fmt nor R_ans.
    """
    rewards: list[Reward | None] = []
    for game in games:
        if game.stop == "env_error":
            rewards.append(None)
            continue
        reward = score(game, rule=rule)
        if own is not None:
            reward = replace(reward, total=own(game, reward))
        rewards.append(reward)
    return rewards


def score(trajectory: Trajectory, *, rule: Rule) -> Reward:
    """R_fmt (eq. 12), R_ans (eqs 13-14) and R (eq. 15) of a game that the environment did not break.

    R is in [-ε, 1].
    """
    assert trajectory.stop != "env_error", "a broken game has no reward: it leaves its group"
    turns, answer = trajectory.turns, trajectory.answer

    # Eq. 12.
    good_turns = sum(is_good_turn(turn) for turn in turns)  # Σ M_t
    format_reward = rule.alpha * good_turns
    if answer is not None:
        format_reward += rule.beta  # A_p
        if answer:
            format_reward += rule.gamma  # A_n
        if turns[-1].action.clean:
            format_reward += rule.delta  # C_f
    cap = rule.unanswered_cap if answer is None else rule.epsilon
    format_reward = min(cap, format_reward)

    # Eqs 13 and 14.
    answer_reward = 0.0 if answer is None else f1(answer, trajectory.question.answers)

    # Eq. 15.
    gate_is_open = format_reward >= rule.epsilon - TOLERANCE
    total = -rule.epsilon + format_reward
    if gate_is_open:
        total += answer_reward
    return Reward(format_reward, answer_reward, total, gate_is_open)


def is_good_turn(turn: Turn) -> bool:
    """M_t of eq. 12: whether the agent thought and asked, before the last turn."""
    was_sent = turn.reply is not None  # The reply may be empty: eq. 12 does not look at it.
    return was_sent and bool(turn.action.think and turn.action.prompt)


def well_formed(trajectory: Trajectory) -> bool:
    """Whether every turn is a think block, one action and nothing else, and the last turn answers."""
    return all(turn.action.clean for turn in trajectory.turns) and bool(trajectory.answer)
