"""`python -m prompt_r1.studies.paper_cost FILE …`: the calls and dollars of all the paper's experiments.

One table with the trainings with GPT-4o-mini and with GPT-OSS-20B, and the searches and answers of Tables 2
to 5. Nothing is called and no model is loaded. Questions of the test files stand for training questions of
the same dataset: 5,120 of each, and 256 for validation, as in the paper.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

from prompt_r1.agent.names import AgentSpec
from prompt_r1.cli.command_line import program_name, run_program
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.fields import NOT_NEGATIVE, check_number
from prompt_r1.config.methods import METHODS
from prompt_r1.config.train import PRESETS, TrainConfig
from prompt_r1.data.mixture import PAPER_DATASETS
from prompt_r1.types import Question

GPT_4O_MINI = "gpt-4o-mini"
GPT_OSS_20B = "gpt-oss-20b"
QWEN3_4B = "qwen3-4b"  # as an environment: the columns of the agent alone
TRAIN, VALIDATION = 5120, 256  # questions of each dataset


def main(arguments: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        program_name("python -m prompt_r1.studies.paper_cost"), description=__doc__.split("\n\n")[1]
    )
    parser.add_argument("data", nargs="+", help="the paper's test files")
    parser.add_argument(
        "--env-price",
        default="0.15,0.60",
        metavar="IN,OUT",
        help="dollars per million tokens of GPT-4o-mini (0.15,0.60); the other models are your own",
    )
    parser.add_argument(
        "--optimize-calls", type=int, default=0, help="budget of each prompt search (0: the authors')"
    )
    given = parser.parse_args(arguments)
    check_number("--optimize-calls", given.optimize_calls, NOT_NEGATIVE)

    from prompt_r1.data.named import find_questions

    questions = find_questions(given.data, "test", 0)
    print(paper_costs(questions, price=given.env_price, budget=given.optimize_calls))


def paper_costs(questions: Sequence[Question], *, price: str, budget: int) -> str:
    """The table for these test questions; `price` is that of GPT-4o-mini, the others are free."""
    # Only here: torch takes seconds to import, and `--help` does without.
    from prompt_r1.baselines.cost_estimate import CostRow, cost_rows_table, estimate_system
    from prompt_r1.environments.budget import Spending
    from prompt_r1.evaluation.systems import choose_systems
    from prompt_r1.training.cost_estimate import parts_of_run, spending_of_game

    prices: dict[str, tuple[str, ...]] = {GPT_4O_MINI: (price,), GPT_OSS_20B: (), QWEN3_4B: ()}
    rows, agents = [], {}
    for environment in (GPT_4O_MINI, GPT_OSS_20B):
        run = TrainConfig(**PRESETS["paper"], env=environment)
        games = sum(part.games for part in parts_of_run(run, validation=run.val_limit, test=0))
        ends = [spending_of_game(run, environment, prices[environment], high=end) for end in (False, True)]
        name = f"trained with {environment}"
        rows.append(CostRow(name, [end.times(games) for end in ends], [Spending(), Spending()]))
        agents[name] = AgentSpec(name, run, run.agent)
    tables = EvaluateConfig(tables=True, method=METHODS, env=(GPT_4O_MINI, GPT_OSS_20B), grpo_agent="alone")
    alone = EvaluateConfig(method=("direct", "cot"), env=(QWEN3_4B,))
    train, validation = (training_questions(questions, count) for count in (TRAIN, VALIDATION))
    for config in (tables, alone):
        for setup in choose_systems(config, agents, seed=0):
            priced = replace(
                config, env_price=prices.get(setup.system.environment, ()), optimize_calls=budget
            )
            rows.append(estimate_system(setup, questions, train, validation, priced))
    return cost_rows_table(rows, priced=True)


def training_questions(questions: Sequence[Question], count: int) -> list[Question]:
    """Test questions of each dataset of the training, repeated to this count."""
    found: list[Question] = []
    for dataset in PAPER_DATASETS:
        own = [question for question in questions if question.dataset == dataset]
        found += islice(cycle(own), count)
    return found


if __name__ == "__main__":
    run_program(main)
