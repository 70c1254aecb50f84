"""Score methods on questions: `python evaluate.py [--data FILE …] [--method NAME …] [--agent …] [--env SPEC
…]`.

    direct      the environment alone: the question as it is
    untrained   the agent before training, in the same game
    prompt-r1   the trained agent; docs/evaluation.md has the other methods, tables and comparisons

Every answer becomes a line of predictions.jsonl in the folder --out as soon as it is there. The same command
again asks only for what is missing or failed, and makes the tables anew.
"""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

from prompt_r1.agent.agent import check_endpoint, check_question_lengths, codec_of
from prompt_r1.baselines import AgentCache, Attempt, Method, make_method, preparation_questions
from prompt_r1.cli.command_line import parse_arguments, run_program
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.data.named import find_questions
from prompt_r1.distributed.ranks import Ranks, pick_device
from prompt_r1.environments.opening import Environments
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import Similarity, score_predictions, text_metrics
from prompt_r1.evaluation.predictions import Prediction, PredictionFile
from prompt_r1.evaluation.results_folder import compare_files, note_preparation, write_results
from prompt_r1.evaluation.systems import (
    LEARNING,
    TRAINED_ALONE,
    Entrant,
    common_seed,
    left_out,
    lineup,
    resolve_agents,
    trained_with,
)
from prompt_r1.metrics.similarity import SentenceEncoder, find_encoder, semantic_similarity
from prompt_r1.metrics.text import Rules
from prompt_r1.reward import RULES, score
from prompt_r1.types import Question


def main(arguments: list[str]) -> None:
    """Evaluate from a command line."""
    config = parse_arguments(EvaluateConfig, "evaluate.py", "Score methods on questions.", arguments)
    similarity = load_similarity(config)  # what cannot be had is told before anything is asked
    if config.compare:
        if len(config.compare) != 2:
            raise UsageError("--compare takes two files: --compare A.jsonl B.jsonl")
        print(compare_files(*config.compare, rules=rules_of(config), similarity=similarity))
        return
    agents = resolve_agents(config)
    seed = common_seed(config, agents)
    questions = questions_of(config, seed)
    entrants = lineup(config, agents, seed)
    for agent in agents.values():
        asyncio.run(check_endpoint(agent))
        check_question_lengths(questions, codec_of(agent), agent.config.max_tokens)
    name = Path(next(iter(agents), "environment").partition("@")[0]).name
    folder = Path(config.out or f"runs/eval-{name}")
    with closing(PredictionFile(folder / "predictions.jsonl")) as file:
        predictions = asyncio.run(evaluate(entrants, questions, file, folder, config, seed))
    scores = score_predictions(predictions, rules=rules_of(config), similarity=similarity)
    print(write_results(folder, scores, trained_with(agents), tables=config.tables))
    if failed := sum(bool(one.error) for one in predictions):
        print(f"\n{failed} answers failed with their calls; the same command asks for them again.")
    print(left_out(config) + f"\nAll of it, with plot, LaTeX and CSV, is in {folder}/")


def questions_of(config: EvaluateConfig, seed: int) -> list[Question]:
    """--data; --tables takes the mini world's questions out of distribution with it."""
    names = [*config.data, *(["mini:ood"] if config.tables and list(config.data) == ["mini"] else [])]
    parts = [find_questions([name], "test", seed)[: config.limit or None] for name in names]
    questions = [question for part in parts for question in part]
    if not questions:
        raise UsageError("no questions: --data names nothing to evaluate on")
    keys = [(question.dataset, question.id) for question in questions]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise UsageError(f"--data: question {twice[1]!r} of {twice[0]} comes twice; give each file once")
    return questions


def rules_of(config: EvaluateConfig) -> Rules:
    """--metrics, whose two values the command line has checked."""
    return "official" if config.metrics == "official" else "strict"


def load_similarity(config: EvaluateConfig) -> Similarity | None:
    """SSim by the encoder of --ssim-model; None: it is not asked for."""
    if not config.ssim_model:
        return None
    given = "" if config.ssim_model == "auto" else config.ssim_model
    encoder = SentenceEncoder(find_encoder(given), device=pick_device(config.device))
    return partial(semantic_similarity, encoder, rules=rules_of(config))


async def evaluate(
    entrants: Sequence[Entrant],
    questions: Sequence[Question],
    file: PredictionFile,
    folder: Path,
    config: EvaluateConfig,
    seed: int,
) -> list[Prediction]:
    """Let each system answer what the file does not hold; all answers, system by system.

    AgentCache are loaded when something is missing, those of one agent at a time.
    """
    wanted = [(question, sample) for question in questions for sample in range(config.repeats)]
    stage = Stage(config, seed, folder, specs=[entrant.system.environment for entrant in entrants])
    try:
        for _, group in groupby(entrants_by_agent(entrants), key=lambda entrant: entrant.agent.path):
            await stage.dismiss()
            for entrant in group:
                missing = [pair for pair in wanted if file.find(entrant.setting, *pair) is None]
                if missing:
                    await answer_all(entrant, await stage.prepare(entrant), missing, file, seed)
    finally:
        await stage.close()
    return [prediction for entrant in entrants for prediction in file.those(entrant.setting, wanted)]


def entrants_by_agent(entrants: Sequence[Entrant]) -> list[Entrant]:
    """The entrants in an order that loads each agent once."""
    paths = list(dict.fromkeys(entrant.agent.path for entrant in entrants))
    return sorted(entrants, key=lambda entrant: paths.index(entrant.agent.path))


class Stage:
    """What the systems share: environments with one journal and one budget, and the agents of the moment."""

    def __init__(self, config: EvaluateConfig, seed: int, folder: Path, *, specs: Iterable[str]) -> None:
        self.config = config
        self.seed = seed
        self.folder = folder
        self.specs = set(filter(None, [*specs, config.optimizer_env]))  # all that may be questioned
        self.agents: dict[str, AgentCache] = {}
        self._device = pick_device(config.device)
        self._environments: dict[str, Pool] = {}
        self._opener: Environments | None = None

    async def prepare(self, entrant: Entrant) -> Method:
        """The system's method, ready to answer. What preparing it cost is noted in the folder."""
        system, config = entrant.system, self.config
        if self._opener is None:  # opens the journal: not for an evaluation that has all its answers
            alone = Ranks(0, 1, self._device)
            self._opener = Environments(
                config, seed=self.seed, folder=self.folder, ranks=alone, other_specs=self.specs
            )
        # A method that asks nobody is given the mini world, which needs no key.
        environment = await self._environment(system.environment or "mini")
        path = str(entrant.agent.path)
        method = make_method(
            system.method,
            environment=environment,
            spec=system.environment or entrant.agent.config.env,
            open_environment=self._opener.open,
            agents=self.agents.setdefault(path, AgentCache(entrant.agent, self._device)),
            temperature=config.temperature,
            seed=self.seed,
            config=config,
            folder=self.folder,
        )
        learns = system.method in LEARNING
        data = preparation_questions(config, config.data, self.seed) if learns else ([], [])
        await method.prepare(*data)
        note_preparation(self.folder, system, asdict(method.ledger))
        return method

    async def dismiss(self) -> None:
        """Let the agents of the moment go."""
        for agents in self.agents.values():
            await agents.close()
        self.agents.clear()

    async def close(self) -> None:
        await self.dismiss()
        for environment in self._environments.values():
            await environment.close()

    async def _environment(self, spec: str) -> Pool:
        if spec not in self._environments:
            assert self._opener is not None
            environment = self._environments[spec] = self._opener.open(spec)
            await environment.check()  # before large agents are loaded
        return self._environments[spec]


async def answer_all(
    entrant: Entrant,
    method: Method,
    missing: Sequence[tuple[Question, int]],
    file: PredictionFile,
    seed: int,
) -> None:
    """All at once; each answer is written as it comes. An error that is not one question's stops them all."""
    bar = tqdm(total=len(missing), desc=str(entrant.system), disable=None, leave=False)

    async def one(question: Question, sample: int) -> None:
        name = f"evaluation/{seed}/{question.id}/{sample}"
        attempt = await method.answer(question, sample=sample, seed=name)
        prediction = prediction_of(attempt, entrant, question, sample)
        file.add(prediction, **({} if prediction.error else text_metrics(prediction)))
        bar.update()

    tasks = [asyncio.create_task(one(*pair)) for pair in missing]
    try:
        await asyncio.gather(*tasks)
    finally:
        bar.close()
        for task in tasks:
            task.cancel()  # does nothing to one that has ended
        await asyncio.gather(*tasks, return_exceptions=True)


def prediction_of(attempt: Attempt, entrant: Entrant, question: Question, sample: int) -> Prediction:
    """The line of an answer."""
    alone = entrant.system.method in TRAINED_ALONE
    rule, game = RULES["alone" if alone else entrant.agent.config.rule], attempt.trajectory
    return Prediction(
        **asdict(entrant.system),
        setting=entrant.setting,
        dataset=question.dataset,
        kind=question.kind,
        id=question.id,
        sample=sample,
        question=question.text,
        answers=question.answers,
        prediction=attempt.answer,
        raw=attempt.raw,
        stop=attempt.stop,
        error=attempt.error or "",
        turns=attempt.turns,
        calls=attempt.calls,
        tokens_in=attempt.tokens_in,
        tokens_out=attempt.tokens_out,
        usd=attempt.usd,
        format=attempt.format,
        reward=score(game, rule=rule).total if game is not None and not attempt.error else None,
    )


if __name__ == "__main__":
    run_program(main)
