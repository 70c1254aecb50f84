"""The double-constrained reward of Prompt-R1 (paper, eqs 12-15): first the format, then the answer.

    R_fmt = min(ε, α Σ_t M_t + β A_p + γ A_n + δ C_f)    (without an answer, a lower cap)     (12)
    R_ans = max over the gold answers of F1(answer, gold)                                    (13, 14)
    R     = -ε + R_fmt + R_ans    if R_fmt = ε                                               (15)
            -ε + R_fmt            otherwise: the gate is shut

M_t = 1 for a turn with a non-empty think and a non-empty prompt block and a reply that is not empty (the
sum ends at T-1: the prompt of the last turn is never sent), A_p = 1 if an answer can be parsed, A_n = 1 if it
is not empty, C_f = 1 if the last turn is a non-empty think, an answer and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prompt_r1.f1 import f1
from prompt_r1.types import Reward, Trajectory


@dataclass(frozen=True)
class Rule:
    """The coefficients of eq. 12, and a user's own reward."""

    alpha: float  # of M_t
    beta: float  # of A_p
    gamma: float  # of A_n
    delta: float  # of C_f
    epsilon: float  # cap of the format reward; the gate opens when it is reached
    unanswered_cap: float  # most that a game without an answer can collect for its format; below epsilon
    own: Callable[[Trajectory, Reward], float] | None = None  # of a game and its reward by eq. 15


RULES = {
    # Appendix G. Two good interactions and a perfect final turn open the gate, or four and any answer that is
    # not empty. Five good turns without an answer collect 1.0: the prompt of the fifth is not sent.
    "paper": Rule(alpha=0.25, beta=0.3, gamma=0.4, delta=0.3, epsilon=1.5, unanswered_cap=1.0),
    # The coefficients of the released code: one good interaction and a perfect final turn open the gate, or
    # two and any answer that is not empty. There, three open it even without an answer; here such a game
    # collects at most epsilon - (beta + gamma + delta). docs/paper.md has the other differences.
    "release": Rule(alpha=0.4, beta=0.25, gamma=0.25, delta=0.1, epsilon=1.0, unanswered_cap=0.4),
    # Training without an environment (GRPO alone): of "release" only the answer's terms, 0.6 in all, can be
    # reached. Scaled to 1: R = -1 + R_fmt / 0.6, plus R_ans when the final turn is perfect.
    "alone": Rule(
        alpha=0.0, beta=0.25 / 0.6, gamma=0.25 / 0.6, delta=0.1 / 0.6, epsilon=1.0, unanswered_cap=0.0
    ),
}

TOLERANCE = 1e-9  # sums of these floats may miss the cap by a rounding error


def score_games(games: Sequence[Trajectory], *, rule: Rule) -> list[Reward | None]:
    """The reward of each game; None for one that the environment broke."""
    return [None if game.stop == "env_error" else score(game, rule=rule) for game in games]


def score(trajectory: Trajectory, *, rule: Rule) -> Reward:
    """R_fmt (eq. 12), R_ans (eqs 13-14) and R (eq. 15) of a game that the environment did not break.

    R is in [-ε, 1]. Without an answer A_p = A_n = C_f = 0, and `unanswered_cap` replaces ε in eq. 12. A
    user's own reward replaces R alone.
    """
    assert trajectory.stop != "env_error", "a broken game has no reward: it leaves its group"
    turns, answer = trajectory.turns, trajectory.answer
    interactions = sum(  # Σ M_t
        bool(turn.action.think and turn.action.prompt and turn.reply and turn.reply.strip()) for turn in turns
    )
    complete = answer is not None and turns[-1].action.clean  # C_f
    terms = (
        rule.alpha * interactions,
        rule.beta * (answer is not None),
        rule.gamma * bool(answer),
        rule.delta * complete,
    )
    cap = rule.unanswered_cap if answer is None else rule.epsilon  # below ε the gate stays shut
    format_reward = min(cap, sum(terms))
    answer_reward = 0.0 if answer is None else f1(answer, trajectory.question.answers)
    gate_is_open = format_reward >= rule.epsilon - TOLERANCE
    total = -rule.epsilon + format_reward + (answer_reward if gate_is_open else 0.0)
    reward = Reward(format_reward, answer_reward, total, gate_is_open)
    return replace(reward, total=rule.own(trajectory, reward)) if rule.own else reward


def well_formed(trajectory: Trajectory) -> bool:
    """Whether every turn is a think block, one action and nothing else, and the last one an answer."""
    return all(turn.action.clean for turn in trajectory.turns) and bool(trajectory.answer)
