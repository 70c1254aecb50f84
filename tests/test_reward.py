"""The reward against values computed by hand from eqs 12-15."""

import pytest

from prompt_r1.reward import RULE_WITHOUT_ENVIRONMENT, RULES, Rule, score, well_formed
from tests.support.games import GOOD, HALF, RIGHT, WRONG, game_of_turns
from tests.support.tiny import think

TABLE = [
    # rule, turns, format reward, total reward
    ("release", [RIGHT], 0.6, -0.4),
    ("release", [GOOD, RIGHT], 1.0, 1.0),
    ("release", [GOOD, HALF], 1.0, 2 / 3),
    ("release", [GOOD, WRONG], 1.0, 0.0),
    ("release", [GOOD] * 4 + [RIGHT], 1.0, 1.0),
    ("release", [GOOD], 0.0, -1.0),  # the prompt of the last turn is not sent: no interaction
    ("release", [GOOD] * 2, 0.4, -0.6),
    ("release", [GOOD] * 3, 0.4, -0.6),  # 0.0 in the released code, which opens the gate here
    ("release", [GOOD] * 5, 0.4, -0.6),
    ("release", ["no tags"], 0.0, -1.0),
    # The released code counts only exact interactions, no empty answer, and more last turns.
    ("release", ["Hm. " + GOOD + "!", RIGHT], 1.0, 1.0),  # 0.6 there
    ("release", [GOOD, GOOD, think("so", answer="")], 1.0, 0.0),  # 0.8 there
    ("release", [GOOD, "<think>so</think> well <answer>Anna Keller</answer>"], 0.9, -0.1),  # 1.0 there
    ("release", [GOOD, "<answer>Anna Keller</answer>"], 0.9, -0.1),  # no think block: incomplete, gate shut
    ("release", [GOOD, think("", answer="Anna Keller")], 0.9, -0.1),
    ("release", [GOOD, RIGHT + " and more"], 0.9, -0.1),
    ("release", [GOOD, think("so", answer="")], 0.75, -0.25),
    ("release", [think("", prompt="who?"), RIGHT], 0.6, -0.4),  # an empty think block: no interaction counted
    ("paper", [RIGHT], 1.0, -0.5),
    ("paper", [GOOD, RIGHT], 1.25, -0.25),
    ("paper", [GOOD, GOOD, RIGHT], 1.5, 1.0),
    ("paper", [GOOD, GOOD, HALF], 1.5, 2 / 3),
    # A bug: five prompts counted as five interactions, though eq. 12 sums to T-1.
    ("paper", [GOOD] * 5, 1.0, -0.5),
    ("paper", [GOOD] * 9, 1.0, -0.5),  # more turns than the paper allows
    ("paper", [], 0.0, -1.5),
    # Without an environment: R = -1 + format / 0.6, plus F1 when format is 0.6.
    ("alone", [RIGHT], 1.0, 1.0),
    ("alone", [HALF], 1.0, 2 / 3),
    ("alone", [WRONG], 1.0, 0.0),
    ("alone", ["<answer>Anna Keller</answer>"], 0.5 / 0.6, -1 + 0.5 / 0.6),
    ("alone", [think("so", answer="")], 0.35 / 0.6, -1 + 0.35 / 0.6),
    ("alone", [GOOD], 0.0, -1.0),  # interactions earn nothing without an environment
]

ALL_RULES = {**RULES, "alone": RULE_WITHOUT_ENVIRONMENT}


@pytest.mark.parametrize(("rule", "turns", "format_reward", "total"), TABLE)
def test_the_reward_is_what_the_equations_say(rule, turns, format_reward, total):
    reward = score(game_of_turns(*turns), rule=ALL_RULES[rule])
    assert reward.format == pytest.approx(format_reward)
    assert reward.total == pytest.approx(total)


@pytest.mark.parametrize("rule", ["paper", "release"])
@pytest.mark.parametrize("good_turns", range(6))
def test_no_answer_always_scores_below_a_well_formed_wrong_answer(rule, good_turns):
    without = score(game_of_turns(*[GOOD] * good_turns, stop="max_turns"), rule=RULES[rule])
    wrong = score(game_of_turns(*[GOOD] * good_turns, WRONG), rule=RULES[rule])
    assert without.total < wrong.total


def test_a_rounding_error_of_the_sum_does_not_shut_the_gate():
    """0.05 + 0.05 + 0.1 + 0.7 is less than 0.9 in floating point, also where Python rounds it once (3.12)."""
    rule = Rule(alpha=0.05, beta=0.05, gamma=0.1, delta=0.7, epsilon=0.9, unanswered_cap=0.1)
    reward = score(game_of_turns(GOOD, RIGHT), rule=rule)
    assert sum((0.05, 0.05, 0.1, 0.7)) < rule.epsilon
    assert reward.gate_is_open and reward.total == pytest.approx(1.0)


def test_a_well_formed_game_has_only_clean_turns_and_an_answer():
    assert well_formed(game_of_turns(GOOD, RIGHT))
    assert not well_formed(game_of_turns(GOOD + "!", RIGHT))
    assert not well_formed(game_of_turns(GOOD))
    assert not well_formed(game_of_turns(GOOD, think("so", answer="")))


def test_the_terms_of_the_format_reward_add_up_to_it_below_the_cap():
    """Release: α = 0.4 per good turn, β = γ = 0.25, δ = 0.1, cap 1, or 0.4 without an answer."""
    empty = score(game_of_turns(GOOD, GOOD, "<answer></answer>"), rule=RULES["release"])
    assert empty.format == 1.0 and empty.gate_is_open
    below_cap = score(game_of_turns(GOOD, think("so", answer="")), rule=RULES["release"])
    assert below_cap.format == pytest.approx(0.4 + 0.25 + 0.1) and not below_cap.gate_is_open
    unanswered = score(game_of_turns(*[GOOD] * 4), rule=RULES["release"])
    assert unanswered.format == 0.4 and not unanswered.gate_is_open
