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
    from prompt_r1.cli.preflight import check_evaluate

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

from prompt_r1.agent.agent import check_question_lengths, codec_of
from prompt_r1.baselines.make import (
    AgentCache,
    MethodContext,
    make_method,
    preparation_questions,
    request_fields,
)
from prompt_r1.baselines.method import Method
from prompt_r1.cli.command_line import command, run_program
from prompt_r1.config.evaluate import EvaluateConfig, evaluate_config
from prompt_r1.config.functions import Metric, import_metric
from prompt_r1.data.questions import sample_questions
from prompt_r1.distributed import Ranks, pick_device
from prompt_r1.environments.pool import Pool
from prompt_r1.environments.specs import Environments
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import score_predictions, text_metrics
from prompt_r1.evaluation.comparison import compare_files
from prompt_r1.evaluation.predictions import Prediction, PredictionFile
from prompt_r1.evaluation.results_folder import note_preparation, write_results
from prompt_r1.evaluation.systems import (
    SystemSetup,
    choose_systems,
    common_seed,
    environments_of,
    leak_warnings,
    resolve_agents,
    trained_with,
    training_files,
    with_data_args,
)
from prompt_r1.metrics.em_f1 import Rules
from prompt_r1.metrics.similarity import SentenceEncoder, find_encoder, semantic_similarity
from prompt_r1.tasks.reasoning import Verifier, uses_verifier
from prompt_r1.terminal import printable
from prompt_r1.types import Question


def main(arguments: list[str]) -> None:
    """Evaluate from a command line."""
    config = evaluate_config(arguments)
    user_metric: Metric | None = Verifier() if uses_verifier(config.data) else None
    if config.answer_metric:
        user_metric = import_metric(config.answer_metric)
    rules: Rules = "official" if config.metrics == "official" else "strict"
    score = partial(score_predictions, rules=rules, own=user_metric)
    if config.ssim_model:  # a missing encoder is reported before any call is made
        given = "" if config.ssim_model == "auto" else config.ssim_model
        encoder = SentenceEncoder(find_encoder(given), device=pick_device(config.device))
        score = partial(score, similarity=partial(semantic_similarity, encoder, rules=rules))
    if config.compare:
        if len(config.compare) != 2:
            raise UsageError("--compare takes two files: --compare A.jsonl B.jsonl")
        print(compare_files(*config.compare, score=score))
        return
    agents = resolve_agents(config)
    config = with_data_args(replace(config, data=config.data or ("mini",)), agents)
    seed = common_seed(config, agents)
    questions = load_questions(config, seed)
    setups = choose_systems(config, agents, seed)
    leaks = leak_warnings(questions, training_files(config, agents))
    playing = ",".join(environments_of(config, agents))
    described = [agent.describe(environment=playing, seed=seed) for agent in agents.values()]
    for line in (*leaks, *described):
        print(printable(line), file=sys.stderr, flush=True)
    for agent in agents.values():
        check_question_lengths(questions, codec_of(agent), agent.config.game)
    name = Path(next(iter(agents), "environment")).name
    folder = Path(config.out or f"runs/eval-{name}")
    with closing(PredictionFile(folder / "predictions.jsonl")) as file:
        evaluation = Evaluation(config, setups, questions, seed, folder, file, user_metric)
        predictions = asyncio.run(evaluation.run())
        print(write_results(folder, score(predictions), trained_with(agents), notes=leaks))
    failed = sum(bool(prediction.error) for prediction in predictions)
    if failed:
        print(f"\n{failed} answers are missing because calls failed; the same command asks for them again.")
    if config.tables and not config.method and not config.grpo_agent:
        train = command("train", "--env", "none")
        print(f"\ngrpo-only is left out: `{train}` trains its agent for --grpo-agent RUN")
    print(f"\nIn {folder}/: results.md, comparisons.md, tables.md")


def load_questions(config: EvaluateConfig, seed: int) -> list[Question]:
    """The questions of --data; with --tables and the mini world also those out of distribution."""
    names = list(config.data)
    if config.tables and names == ["mini"]:
        names.append("mini:ood")
    questions: dict[tuple[str, str], Question] = {}
    for name in names:
        for question in sample_questions([name], "test", seed, config.limit, config.data_args):
            key = question.dataset, question.id
            if key in questions:
                raise UsageError(f"--data: question {key[1]!r} of {key[0]} occurs twice; give each file once")
            questions[key] = question
    if not questions:
        raise UsageError("no questions: --data names nothing to evaluate on")
    return list(questions.values())


@dataclass
class Evaluation:
    """Lets each system answer the questions that the file lacks.

    The systems share the environments, with one journal and one budget, and their agent.
    """

    config: EvaluateConfig
    setups: Sequence[SystemSetup]
    questions: Sequence[Question]
    seed: int
    folder: Path
    file: PredictionFile
    user_metric: Metric | None
    _agents: AgentCache | None = None
    _pools: dict[str, Pool] = field(default_factory=dict)  # by SPEC
    _fields: dict[str, Mapping[str, object]] = field(default_factory=dict)  # of their requests

    async def run(self) -> list[Prediction]:
        """All answers, system by system.

        An agent is loaded when one of its answers is missing, and only the systems of one agent at a time.
        """
        repeats = range(self.config.repeats)
        wanted = [(question, sample) for question in self.questions for sample in repeats]
        paths = list(dict.fromkeys(setup.agent.path for setup in self.setups))
        try:
            for setup in sorted(self.setups, key=lambda setup: paths.index(setup.agent.path)):
                missing = [pair for pair in wanted if self.file.find(setup.setting, *pair) is None]
                if missing:
                    # No variable keeps the method, which would keep its agent beside the next one.
                    await self._answer_all(setup, await self._prepare(setup), missing)
        finally:
            self._release_agents()
        found = [self.file.predictions_for(setup.setting, wanted) for setup in self.setups]
        return [prediction for predictions in found for prediction in predictions]

    async def _prepare(self, setup: SystemSetup) -> Method:
        """The system's method, ready to answer. Notes in the folder what the preparation cost."""
        system, config = setup.system, self.config
        if self._agents is None or self._agents.spec.path != setup.agent.path:
            self._release_agents()
            self._agents = AgentCache(setup.agent, self._device)
        context = MethodContext(
            # A method that asks no environment gets the mini world, which needs no key.
            environment=await self._environment(system.environment or "mini", system.method),
            spec=system.environment or setup.agent.config.env,
            environments=self._environments,
            datasets=list(dict.fromkeys(question.dataset for question in self.questions)),
            agents=self._agents,
            config=config,
            seed=self.seed,
            folder=self.folder,
        )
        method = make_method(system.method, context)
        await method.prepare(*preparation_questions([system.method], config, self.seed))
        note_preparation(self.folder, system, method.ledger.row)
        return method

    async def _answer_all(
        self, setup: SystemSetup, method: Method, missing: Sequence[tuple[Question, int]]
    ) -> None:
        """Answer all questions concurrently, and write each answer with its scores at once.

        A failed call of one question is recorded with its answer; any other error cancels the rest and is
        raised.
        """

        async def answer_one(question: Question, sample: int) -> None:
            answer_seed = f"evaluation/{self.seed}/{question.id}/{sample}"
            answer = await method.answer(question, sample=sample, seed=answer_seed)
            answer = replace(answer, sample=sample, system=setup.system, setting=setup.setting)
            self.file.add(replace(answer, metrics=text_metrics(answer, own=self.user_metric)))
            bar.update()

        with tqdm(total=len(missing), desc=str(setup.system), disable=None, leave=False) as bar:
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
        specs = (*(setup.system.environment for setup in self.setups), self.config.optimizer_env)
        return Environments(
            self.config,
            seed=self.seed,
            folder=self.folder,
            ranks=Ranks(0, 1, self._device),
            other_specs={spec for spec in specs if spec},
            user_specs=[*self.config.env, self.config.optimizer_env],
        )

    async def _environment(self, spec: str, method: str) -> Pool:
        """The environment with the request fields of a method; one with others is freed."""
        fields = request_fields(method, self.config, self.config.env_args)
        opened = spec in self._pools
        if not opened or self._fields[spec] != fields:
            self._pools.pop(spec, None)  # a local model is in memory once
            self._pools[spec] = self._environments.open(spec, fields=fields)
            self._fields[spec] = fields
        if not opened:
            await self._pools[spec].check()  # before large agents are loaded
        return self._pools[spec]

    def _release_agents(self) -> None:
        self._agents = None
        gc.collect()  # an engine is part of a reference cycle


if __name__ == "__main__":
    run_program(main)
