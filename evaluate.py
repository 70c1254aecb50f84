"""Score methods on questions: `python evaluate.py [--data FILE …] [--method NAME …] [--agent …] [--env …]`.

    direct      the environment alone, asked the question itself
    untrained   the agent before training, in the same game
    prompt-r1   the trained agent

docs/evaluation.md describes the other methods, the tables and the comparisons. Each answer is appended to
predictions.jsonl in the folder --out. The same command again asks only for missing and failed answers, and
writes the tables anew.
"""

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.cli.installation import check_installation

    check_installation()
    from prompt_r1.cli.command_line import check_usage
    from prompt_r1.evaluation.preflight import check_evaluate

    check_usage(check_evaluate)

import asyncio
import gc
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from tqdm import tqdm

from prompt_r1.agent.agent import Agent, check_question_lengths, codec_of
from prompt_r1.agent.names import AgentSpec
from prompt_r1.baselines.make import MethodContext, make_method, preparation_questions, request_fields
from prompt_r1.baselines.method import Method
from prompt_r1.cli.command_line import command, run_program
from prompt_r1.config.evaluate import EvaluateConfig, evaluate_config
from prompt_r1.config.fields import identifying_values
from prompt_r1.data.questions import sample_questions
from prompt_r1.distributed import pick_device
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.specs import Environments
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import score_predictions, text_metrics
from prompt_r1.evaluation.predictions import FILE, Prediction, PredictionFile, System, short_names
from prompt_r1.evaluation.results_folder import TABLES, keep_settings, note_preparation, write_results
from prompt_r1.evaluation.systems import (
    choose_systems,
    common_seed,
    contents_of,
    environments_of,
    resolve_agents,
    trained_with,
)
from prompt_r1.metrics.em_f1 import Rules
from prompt_r1.metrics.similarity import SentenceEncoder, find_encoder, semantic_similarity
from prompt_r1.terminal import printable
from prompt_r1.types import Question


def main(arguments: list[str]) -> None:
    """Evaluate from a command line."""
    config = evaluate_config(arguments)
    rules: Rules = "official" if config.metrics == "official" else "strict"
    score = partial(score_predictions, rules=rules)
    if config.ssim_model:  # a missing encoder is reported before any call is made
        given = "" if config.ssim_model == "auto" else config.ssim_model
        encoder = SentenceEncoder(find_encoder(given), device=pick_device(config.device))
        score = partial(score, similarity=partial(semantic_similarity, encoder, rules=rules))
    agents = resolve_agents(config)
    config = replace(config, data=config.data or ("mini",))
    seed = common_seed(config, agents)
    questions = load_questions(config, seed)
    systems = choose_systems(config, agents)
    playing = ",".join(environments_of(config, agents))
    for agent in agents.values():
        print(printable(agent.describe(environment=playing, seed=seed)), file=sys.stderr, flush=True)
        check_question_lengths(questions, codec_of(agent), agent.config.game)
    folder = Path(config.out or f"runs/eval-{Path(next(iter(agents), 'environment')).name}")
    with closing(PredictionFile(folder / FILE)) as file:
        keep_settings(folder, identifying_values(config) | {"seed": seed}, contents_of(config, systems))
        evaluation = Evaluation(config, systems, questions, seed, folder, file)
        predictions = asyncio.run(evaluation.run())
        print(write_results(folder, score(predictions), trained_with(agents)))
    failed = sum(bool(prediction.error) for prediction in predictions)
    if failed:
        print(f"\n{failed} answers are missing because calls failed; the same command asks for them again.")
    if config.tables and not config.method and not config.grpo_agent:
        train = command("train", "--env", "none")
        print(f"\ngrpo-only is left out: `{train}` trains its agent for --grpo-agent RUN")
    print(f"\nIn {folder / TABLES}: all datasets, the paper's tables, and comparisons")


def load_questions(config: EvaluateConfig, seed: int) -> list[Question]:
    """The questions of --data; with --tables and the mini world also those out of distribution."""
    names = list(config.data)
    if config.tables and names == ["mini"]:
        names.append("mini:ood")
    questions: dict[tuple[str, str], Question] = {}
    for name in names:
        for question in sample_questions([name], "test", seed, config.limit):
            key = question.dataset, question.id
            if key in questions:
                raise UsageError(f"--data: question {key[1]!r} of {key[0]} occurs twice; give each file once")
            questions[key] = question
    if not questions:
        raise UsageError("no questions: --data names nothing to evaluate on")
    return list(questions.values())


@dataclass
class Evaluation:
    """Lets each system answer the questions that the file lacks, with one journal and one budget for all."""

    config: EvaluateConfig
    systems: Mapping[System, AgentSpec]
    questions: Sequence[Question]
    seed: int
    folder: Path
    file: PredictionFile
    _opened: tuple[str, Mapping[str, object], Environment] | None = (
        None  # SPEC, fields of its requests, environment
    )
    _agents: dict[str, Agent] = field(default_factory=dict)  # of one AgentSpec

    async def run(self) -> list[Prediction]:
        """All answers, system by system, sorted by agent: only the agents of one AgentSpec are in memory."""
        repeats = range(self.config.repeats)
        wanted = [(question, sample) for question in self.questions for sample in repeats]
        paths = list(dict.fromkeys(agent.path for agent in self.systems.values()))
        last = None
        for system in sorted(self.systems, key=lambda system: paths.index(self.systems[system].path)):
            missing = [pair for pair in wanted if self.file.find(system, *pair) is None]
            if not missing:
                continue
            if self.systems[system] != last:
                self._agents, last = {}, self.systems[system]
                gc.collect()  # an engine is part of a reference cycle
            # No variable keeps the method, which would keep its agent beside the next one.
            await self._answer_all(system, await self._prepare(system), missing)
        found = [self.file.predictions_for(system, wanted) for system in self.systems]
        return [prediction for predictions in found for prediction in predictions]

    async def _prepare(self, system: System) -> Method:
        """The system's method, ready to answer. Notes in the folder what the preparation cost."""
        agent = self.systems[system]
        context = MethodContext(
            # A method that asks no environment gets the mini world, which needs no key.
            environment=await self._environment(system.environment or "mini", system.method),
            spec=system.environment or agent.config.env,
            environments=self._environments,
            datasets=list(dict.fromkeys(question.dataset for question in self.questions)),
            agent=agent,
            device=self._device,
            config=self.config,
            seed=self.seed,
            folder=self.folder,
            agents=self._agents,
        )
        method = make_method(system.method, context)
        await method.prepare(*preparation_questions([system.method], self.config, self.seed))
        if any(method.ledger.row.values()):
            note_preparation(self.folder, short_names(self.systems)[system], method.ledger.row)
        return method

    async def _answer_all(
        self, system: System, method: Method, missing: Sequence[tuple[Question, int]]
    ) -> None:
        """Answer all questions concurrently, and write each answer with its scores at once.

        A failed call of one question is recorded with its answer; any other error cancels the rest and is
        raised.
        """

        async def answer_one(question: Question, sample: int) -> None:
            answer_seed = f"evaluation/{self.seed}/{question.id}/{sample}"
            answer = await method.answer(question, sample=sample, seed=answer_seed)
            answer = replace(answer, sample=sample, system=system)
            self.file.add(replace(answer, metrics=text_metrics(answer)))
            bar.update()

        with tqdm(total=len(missing), desc=str(system), disable=None, leave=False) as bar:
            try:
                async with asyncio.TaskGroup() as group:
                    for pair in missing:
                        group.create_task(answer_one(*pair))
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None

    @cached_property
    def _device(self) -> torch.device:
        return pick_device(self.config.device)

    @cached_property
    def _environments(self) -> Environments:
        """What opens the environments; it has the journal, which a complete evaluation does not need."""
        specs = (*(system.environment for system in self.systems), self.config.optimizer_env)
        return Environments(
            self.config,
            seed=self.seed,
            device=self._device,
            folder=self.folder,
            other_specs={spec for spec in specs if spec},
            user_specs=[*self.config.env, self.config.optimizer_env],
        )

    async def _environment(self, spec: str, method: str) -> Environment:
        """The environment with the request fields of a method; one at a time is open."""
        fields = request_fields(method, self.config.env_args)
        if self._opened is None or self._opened[:2] != (spec, fields):
            self._opened = None  # a local model is in memory once
            pool = self._environments.open(spec, fields=fields)
            await pool.check()  # before large agents are loaded
            self._opened = spec, fields, pool
        return self._opened[2]


if __name__ == "__main__":
    run_program(main)
