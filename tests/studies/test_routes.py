"""The study of routes: what it trains, its table and its conclusion."""

import pytest

from prompt_r1.cli.command_line import train_config
from prompt_r1.studies.routes import (
    AGENTS,
    AWARE,
    BLIND,
    SPEC,
    SYSTEMS,
    Played,
    conclusion,
    frontier,
    point_of,
    routes_table,
)

GAMES = {
    AWARE: {
        0: Played([1.0] * 9 + [0.0], [1e-6] * 10, (5, 15)),
        1: Played([1.0] * 10, [3e-6] * 10, (6, 14)),
    },
    BLIND: {
        0: Played([1.0] * 10, [4e-6] * 10, (20, 0)),
        1: Played([1.0] * 10, [4e-6] * 10, (19, 1)),
    },
}


@pytest.mark.parametrize("name", AGENTS)
def test_the_flags_of_every_agent_are_ones_that_train_py_takes(name):
    words = [str(word) for flag, values in AGENTS[name].items() for word in (flag, *values)]
    train_config(words)


def test_every_system_plays_an_agent_that_is_trained():
    assert {system.agent for system in SYSTEMS.values()} == set(AGENTS)
    for system in SYSTEMS.values():
        assert (system.route == "agent") == (AGENTS[system.agent]["--env"] == [SPEC])


def test_the_table_pools_the_seeds_and_compares_dollars_with_the_cost_blind_agent():
    header, _, aware, blind = routes_table(GAMES).splitlines()
    assert "seed 0 | seed 1" in header
    cells = [cell.strip() for cell in aware.split("|")[1:-1]]
    assert cells[0] == AWARE and cells[1].startswith("0.950 [") and cells[2:4] == ["0.900", "1.000"]
    assert cells[4].startswith("0.0020 [") and cells[5:] == ["50%", "11", "29"]
    assert [cell.strip() for cell in blind.split("|")][6] == "100%"
    assert point_of(GAMES[BLIND][0]).x == pytest.approx(4e-3)  # dollars per 1,000 questions
    assert [series.label for series in frontier(GAMES).series] == [AWARE, BLIND]


def test_the_conclusion_pairs_the_questions_and_states_each_seed():
    text = conclusion(GAMES)
    assert "EM -0.050 [" in text and "by seed: 75%, 25%" in text
