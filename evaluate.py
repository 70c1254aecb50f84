"""Score methods on questions: `python evaluate.py [--data FILE …] [--method NAME …] [--agent …] [--env …]`.

    direct      the environment alone, asked the question itself
    untrained   the agent before training, in the same game
    prompt-r1   the trained agent

docs/evaluation.md describes the other methods, the tables and the comparisons. Each answer is appended to
predictions.jsonl in the folder --out. The same command again asks only for missing and failed answers, and
writes the tables anew.
"""

if __name__ == "__main__":  # --help and usage errors, before the imports below take seconds
    from prompt_r1.cli.command_line import check_usage, evaluate_config

    check_usage(evaluate_config)

import asyncio
import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

from prompt_r1.agent.agent import check_endpoint, check_question_lengths, codec_of
from prompt_r1.baselines import (
    AgentCache,
    Method,
    MethodContext,
    make_method,
    preparation_questions,
    request_fields,
)
from prompt_r1.baselines.cost_estimate import cost_rows_table, estimate_evaluation
from prompt_r1.cli.command_line import evaluate_config, run_program
from prompt_r1.cli.crash_report import crash_report_in
from prompt_r1.config.evaluate import EvaluateConfig
from prompt_r1.config.functions import Metric, import_metric
from prompt_r1.data.named import sample_questions
from prompt_r1.distributed.ranks import Ranks, pick_device
from prompt_r1.environments.opening import Environments
from prompt_r1.environments.pool import Pool
from prompt_r1.errors import UsageError
from prompt_r1.evaluation.aggregate import Similarity, score_predictions, text_metrics
from prompt_r1.evaluation.leaks import leak_warnings
from prompt_r1.evaluation.predictions import Prediction, PredictionFile
from prompt_r1.evaluation.results_folder import compare_files, note_preparation, write_results
from prompt_r1.evaluation.systems import (
    GAMES,
    LEARNING,
    SystemSetup,
    choose_systems,
    common_seed,
    environments_of,
    note_on_missing_method,
    resolve_agents,
    trained_with,
    training_files,
)
from prompt_r1.metrics.similarity import SentenceEncoder, find_encoder, semantic_similarity
from prompt_r1.metrics.text import Rules
from prompt_r1.options.routes import AGENT_ROUTE
from prompt_r1.terminal import printable
from prompt_r1.types import Question


def main(arguments: list[str]) -> None:
    """Evaluate from a command line."""
    config = evaluate_config(arguments)
    own = own_metric(config)
    similarity = load_similarity(config)  # a missing encoder is reported before any call is made
    if config.compare:
        if len(config.compare) != 2:
            raise UsageError("--compare takes two files: --compare A.jsonl B.jsonl")
        print(compare_files(*config.compare, rules=rules_of(config), similarity=similarity, own=own))
        return
    agents = resolve_agents(config)
    seed = common_seed(config, agents)
    questions = load_questions(config, seed)
    setups = choose_systems(config, agents, seed)
    if config.dry_run:
        rows = estimate_evaluation(setups, questions, config, seed)
        print(cost_rows_table(rows, priced=bool(config.env_price)))
        return
    leaks = leak_warnings(questions, training_files(config, agents))
    for warning in leaks:
        print(printable(warning), file=sys.stderr, flush=True)
    for agent in agents.values():
        playing = ",".join(environments_of(config, agents))
        print(printable(agent.describe(environment=playing, seed=seed)), file=sys.stderr, flush=True)
        asyncio.run(check_endpoint(agent))
        check_question_lengths(questions, codec_of(agent), agent.config.max_tokens)
    name = Path(next(iter(agents), "environment").partition("@")[0]).name
    folder = Path(config.out or f"runs/eval-{name}")
    with closing(PredictionFile(folder / "predictions.jsonl")) as file, crash_report_in(folder):
        predictions = asyncio.run(evaluate(setups, questions, file, folder, config, seed))
        results = score_predictions(predictions, rules=rules_of(config), similarity=similarity, own=own)
        print(write_results(folder, results, trained_with(agents), notes=leaks))
    failed = sum(bool(prediction.error) for prediction in predictions)
    if failed:
        print(f"\n{failed} answers are missing because calls failed; the same command asks for them again.")
    files = "results.md, comparisons.md, tables.md, LaTeX, CSV, cost.svg"
    print(note_on_missing_method(config) + f"\nIn {folder}/: {files}")


def load_questions(config: EvaluateConfig, seed: int) -> list[Question]:
    """The questions of --data; with --tables and the mini world also those out of distribution."""
    names = list(config.data)
    if config.tables and names == ["mini"]:
        names.append("mini:ood")
    questions = []
    for name in names:
        questions += sample_questions([name], "test", seed, config.limit)
    if not questions:
        raise UsageError("no questions: --data names nothing to evaluate on")
    seen = set()
    for question in questions:
        if (question.dataset, question.id) in seen:
            raise UsageError(
                f"--data: question {question.id!r} of {question.dataset} occurs twice; give each file once"
            )
        seen.add((question.dataset, question.id))
    return questions


def rules_of(config: EvaluateConfig) -> Rules:
    """--metrics as a literal; its choices were checked by the command line."""
    return "official" if config.metrics == "official" else "strict"


def own_metric(config: EvaluateConfig) -> Metric | None:
    """The metric of --answer-metric; None if it was not given."""
    return import_metric(config.answer_metric) if config.answer_metric else None


def load_similarity(config: EvaluateConfig) -> Similarity | None:
    """SSim with the encoder of --ssim-model; None if it was not requested."""
    if not config.ssim_model:
        return None
    given = "" if config.ssim_model == "auto" else config.ssim_model
    encoder = SentenceEncoder(find_encoder(given), device=pick_device(config.device))
    return partial(semantic_similarity, encoder, rules=rules_of(config))


async def evaluate(
    setups: Sequence[SystemSetup],
    questions: Sequence[Question],
    file: PredictionFile,
    folder: Path,
    config: EvaluateConfig,
    seed: int,
) -> list[Prediction]:
    """Let each system answer the questions that the file lacks. Returns all answers, system by system.

    An agent is loaded when one of its answers is missing, and only the systems of one agent at a time.
    """
    wanted = [(question, sample) for question in questions for sample in range(config.repeats)]
    specs = [setup.system.environment for setup in setups]
    datasets = list(dict.fromkeys(question.dataset for question in questions))
    resources = Resources(config, seed, folder, specs=specs, datasets=datasets)
    try:
        for _, group in groupby(ordered_by_agent(setups), key=lambda setup: setup.agent.path):
            await resources.release_agents()
            for setup in group:
                missing = [pair for pair in wanted if file.find(setup.setting, *pair) is None]
                if missing:
                    # No variable keeps the method, which would keep its agent beside the next one.
                    await answer_all(
                        setup, await resources.prepare(setup), missing, file, seed, own=own_metric(config)
                    )
    finally:
        await resources.close()
    return [prediction for setup in setups for prediction in file.predictions_for(setup.setting, wanted)]


def ordered_by_agent(setups: Sequence[SystemSetup]) -> list[SystemSetup]:
    """The systems in an order in which each agent is loaded once."""
    paths = list(dict.fromkeys(setup.agent.path for setup in setups))
    return sorted(setups, key=lambda setup: paths.index(setup.agent.path))


@dataclass(frozen=True)
class OpenPool:
    """An open environment, the fields of its requests and its route."""

    pool: Pool
    fields: Mapping[str, object]
    route: str


class Resources:
    """What the systems share: environments with one journal and one budget, and loaded agents."""

    def __init__(
        self,
        config: EvaluateConfig,
        seed: int,
        folder: Path,
        *,
        specs: Iterable[str],
        datasets: Sequence[str],
    ) -> None:
        """`specs`: the environments of all systems. `datasets`: those of the questions."""
        self.config = config
        self.seed = seed
        self.folder = folder
        self.agents: dict[str, AgentCache] = {}
        self._datasets = datasets
        self._specs = {spec for spec in (*specs, config.optimizer_env) if spec}
        self._device = pick_device(config.device)
        self._open_pools: dict[str, OpenPool] = {}  # by SPEC
        self._environments: Environments | None = None

    async def prepare(self, setup: SystemSetup) -> Method:
        """The system's method, ready to answer. Notes in the folder what the preparation cost."""
        system, config = setup.system, self.config
        if self._environments is None:  # this opens the journal, which a complete evaluation does not need
            alone = Ranks(0, 1, self._device)
            self._environments = Environments(
                config,
                seed=self.seed,
                folder=self.folder,
                ranks=alone,
                other_specs=self._specs,
                user_specs=[*config.env, config.optimizer_env],
            )
        own = setup.agent.config  # of an agent that names environments, whatever --route is
        route = own.route if system.method in GAMES and own.route == AGENT_ROUTE else config.route
        context = MethodContext(
            # A method that asks no environment gets the mini world, which needs no key.
            environment=await self._environment(system.environment or "mini", system.method, route),
            spec=system.environment or setup.agent.config.env,
            environments=self._environments,
            datasets=self._datasets,
            agents=self.agents.setdefault(
                f"{setup.agent.path} {own.told}", AgentCache(setup.agent, self._device)
            ),
            config=config,
            temperature=config.temperature,
            top_p=config.top_p,
            seed=self.seed,
            folder=self.folder,
        )
        method = make_method(system.method, context)
        if system.method in LEARNING:
            train, validation = preparation_questions(config, config.data, self.seed)
        else:
            train, validation = [], []
        await method.prepare(train, validation)
        note_preparation(self.folder, system, asdict(method.ledger))
        return method

    async def release_agents(self) -> None:
        """Close and free the loaded agents."""
        for agents in self.agents.values():
            await agents.close()
        self.agents.clear()
        gc.collect()  # an engine is part of a reference cycle

    async def close(self) -> None:
        await self.release_agents()
        for opened in self._open_pools.values():
            await opened.pool.close()

    async def _environment(self, spec: str, method: str, route: str) -> Pool:
        """The environment with the request fields of a method and a route; one with others is closed."""
        fields = request_fields(method, self.config, self.config.env_args)
        opened = self._open_pools.get(spec)
        if opened and (opened.fields, opened.route) == (fields, route):
            return opened.pool
        if opened:
            del self._open_pools[spec]  # a local model is in memory once
            await opened.pool.close()
        assert self._environments is not None
        pool = self._environments.open(spec, fields=fields, route=route)
        self._open_pools[spec] = OpenPool(pool, fields, route)
        if not opened:
            await pool.check()  # before large agents are loaded
        return pool


async def answer_all(
    setup: SystemSetup,
    method: Method,
    missing: Sequence[tuple[Question, int]],
    file: PredictionFile,
    seed: int,
    *,
    own: Metric | None,
) -> None:
    """Answer all questions concurrently, and write each answer with its scores at once.

    A failed call of one question is recorded with its answer; any other error cancels the rest and is raised.
    """
    bar = tqdm(total=len(missing), desc=str(setup.system), disable=None, leave=False)

    async def answer_one(question: Question, sample: int) -> None:
        answer_seed = f"evaluation/{seed}/{question.id}/{sample}"
        prediction = await method.answer(question, sample=sample, seed=answer_seed)
        file.add(
            replace(
                prediction,
                sample=sample,
                system=setup.system,
                setting=setup.setting,
                metrics=text_metrics(prediction, own=own),
            )
        )
        bar.update()

    tasks = [asyncio.create_task(answer_one(*pair)) for pair in missing]
    try:
        await asyncio.gather(*tasks)
    finally:
        bar.close()
        for task in tasks:
            task.cancel()  # has no effect on a task that has ended
        await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    run_program(main)
