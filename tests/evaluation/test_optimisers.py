"""OPRO, TextGrad and GEPA in a scripted world where one sentence in the prompt helps.

With it the environment answers 90 % of the questions correctly, without it 30 %. The optimisers find it, and
make as many calls as the formulas of their authors say. Each dataset has a search of its own. And what every
method sends with its requests.
"""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest

from prompt_r1.environments.asking import last_between
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.sources import Caller, Reply
from prompt_r1.errors import EnvError, Resumable
from prompt_r1.evaluation import making
from prompt_r1.evaluation.gepa import GEPA, draw_parent, filled_batches, mean_score, read_fenced_prompt
from prompt_r1.evaluation.methods import METHODS
from prompt_r1.evaluation.opro import OPRO, is_usable, meta_prompt, read_instruction
from prompt_r1.evaluation.predictions import System
from prompt_r1.evaluation.searches import PATIENCE, SEED_PROMPT, Data, PromptSearch
from prompt_r1.evaluation.textgrad import TEXTGRAD, endless_batches, rewrite
from prompt_r1.types import Message, Question
from tests.support.json_server import JsonHandler, serving
from tests.support.methods import PricedSource, method, priced
from tests.support.programs import run_here
from tests.support.providers import body_of

ALGORITHMS = {"opro": OPRO, "textgrad": TEXTGRAD, "gepa": GEPA}
PHRASE = "Check the units."
QUESTIONS = [Question(str(n), "a", f"What is number {n}?", (f"gold {n}",)) for n in range(300)]
TRAIN, VALIDATION, TEST = QUESTIONS[:40], QUESTIONS[40:60], QUESTIONS[100:]


def answering_task() -> PricedSource:
    """Answers 30 % of the questions correctly, 90 % if the system message contains the phrase."""

    def reply(messages: list[Message]) -> str:
        number = messages[-1]["content"].split("number ")[1].split("?")[0]
        skill = 0.9 if PHRASE in messages[0]["content"] else 0.3
        right = random.Random(f"luck {number}").random() < skill
        return f"<answer>{'gold' if right else 'lead'} {number}</answer>"

    return PricedSource(reply)


def right_answer(messages: list[Message]) -> str:
    number = messages[-1]["content"].split("number ")[1].split("?")[0]
    return f"<answer>gold {number}</answer>"


def new_writer() -> PricedSource:
    """Writes a new prompt, one in five with the phrase; or criticism if no prompt is requested."""

    def reply(messages: list[Message]) -> str:
        request = messages[-1]["content"]
        rng = random.Random(f"{writer.numbers[-1]} {request}")
        text = f"{'Be quick' if rng.random() < 0.8 else PHRASE} Version {rng.random()}."
        for opening, closing in (("<INS>", "</INS>"), ("<IMPROVED_VARIABLE>", "</IMPROVED_VARIABLE>")):
            if opening in request:
                return f"{opening}{text}{closing}"
        return f"```\n{text}\n```" if "```" in request else "Vague."

    writer = PricedSource(reply, tokens_in=7, tokens_out=5)
    return writer


def new_search(
    task: PricedSource | None = None, writer: PricedSource | None = None, *, max_calls: int = 0, seed: int = 0
) -> PromptSearch:
    """A search that scores prompts on 20 questions; a test may replace its parts."""
    environment, optimizer = priced(task or answering_task()), priced(writer or new_writer())
    return PromptSearch(System("searched"), "a", environment, optimizer, max_calls, examples=20, seed=seed)


def find(name: str, search: PromptSearch) -> str:
    """The prompt that an optimiser finds."""
    return asyncio.run(ALGORITHMS[name].find_prompt(search, Data(TRAIN, VALIDATION)))


def prompts_tried(task: PricedSource) -> list[str]:
    """The system messages under which a task was asked, each as often as it was."""
    return [messages[0]["content"] for messages in task.asked]


def budget(name: str) -> int:
    """A limit of calls where the authors' own is too long for a test."""
    return 1000 if name == "opro" else 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_each_optimiser_finds_the_better_prompt_within_the_budget_of_its_authors(name):
    def accuracy(prompt: str) -> float:
        return mean_score(asyncio.run(new_search().try_prompt(prompt, TEST)))

    found = [find(name, new_search(max_calls=budget(name), seed=seed)) for seed in range(3)]
    assert accuracy(SEED_PROMPT) == pytest.approx(0.3, abs=0.08)
    assert [accuracy(prompt) > 0.8 for prompt in found] == [True] * 3


def test_opro_scores_each_new_instruction_once_and_makes_no_call_that_cannot_be_of_use():
    """With 1,000 calls and 261 questions, 208 of 216 optimiser calls came after the last scored one."""
    task, writer = answering_task(), new_writer()
    search = new_search(task, writer, max_calls=1000)
    find("opro", search)
    tried = Counter(prompts_tried(task))
    assert set(tried.values()) == {20} and len(tried) > 20
    assert search.environment_calls == len(task.asked) and search.optimizer_calls % 8 == 0
    few = new_search(max_calls=2 * 20 + 15)  # the seed prompt, eight instructions, one of them scored
    find("opro", few)
    assert (few.calls, few.environment_calls) == (48, 40)


def test_textgrad_makes_ten_calls_per_update_and_validates_each_update():
    search = new_search()
    find("textgrad", search)
    updates = 3 * 4
    assert search.environment_calls == 3 * updates + 20 * (1 + updates)
    assert search.optimizer_calls == 2 * 3 * updates + updates


def test_textgrad_keeps_a_prompt_that_scores_as_high_and_rejects_a_lower_one():
    """An update criticises 3 answers to the prompt that was kept last, then validates the new one."""
    task = answering_task()
    found = find("textgrad", new_search(task))
    tried, kept, ties = prompts_tried(task), SEED_PROMPT, 0

    def score(prompt: str) -> float:
        held_out = random.Random("chosen 0").sample(VALIDATION, 20)
        return mean_score(asyncio.run(new_search().try_prompt(prompt, held_out)))

    for start in range(20, len(tried), 23):
        assert tried[start : start + 3] == [kept] * 3
        [new] = set(tried[start + 3 : start + 23])
        ties += score(new) == score(kept)
        kept = new if score(new) >= score(kept) else kept
    assert found == kept and ties and len(set(tried)) > 3


@pytest.mark.parametrize("seed", range(3))
def test_gepa_makes_seven_calls_per_iteration_and_validates_new_candidates(seed):
    task = answering_task()
    search = new_search(task, seed=seed)
    find("gepa", search)
    rewrites, calls = search.optimizer_calls, search.environment_calls
    validated = sum(count >= 20 for count in Counter(prompts_tried(task)).values())
    perfect = calls - 20 * validated - 6 * rewrites  # 3 calls of each parent that needs no rewrite
    assert validated > 1 and perfect >= 0 and perfect % 3 == 0
    assert 150 <= calls < 150 + 6 + 20


def test_gepa_validates_no_prompt_that_only_equals_its_parent_on_their_questions():
    search = new_search(writer=PricedSource(lambda _: "```\nBe quick.\n```"))
    find("gepa", search)
    assert list(search.scores) == [SEED_PROMPT] and len(search.tried) == 2


@pytest.mark.parametrize("tagged", [True, False])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_search_exceeds_its_limit_of_calls_whatever_the_limit(name, tagged):
    """With a limit of 10, the first scoring alone took 261 calls of OPRO and 50 of the others; and TextGrad
    made 111 calls under a limit of 110."""
    for limit in (1, 10, 19, 20, 21, 28, 30, 49, 52, 99, 110, 300):
        task, writer = answering_task(), new_writer() if tagged else PricedSource(lambda _: "Vague.")
        search = new_search(task, writer, max_calls=limit)
        assert find(name, search)
        made = len(task.asked) + len(writer.asked)
        assert made <= limit
        assert made == search.calls
        assert made or limit < 20, "nothing is asked if no prompt can be scored"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_search_with_a_limit_goes_on_until_the_next_step_might_exceed_it(name):
    search = new_search(max_calls=600)
    find(name, search)
    most = {"opro": 20 + 8, "textgrad": 3 * 3 + 1 + 20, "gepa": 2 * 3 + 1 + 20}[name]
    assert 600 - most < search.calls <= 600


def test_gepa_goes_on_after_it_has_validated_a_child_on_fifty_questions():
    """A bug: they counted as calls without a new prompt, so the first such child ended the search."""
    search = new_search(max_calls=600)
    search.examples = 50
    asyncio.run(GEPA.find_prompt(search, Data(TRAIN, QUESTIONS[40:100])))
    assert 600 - (2 * 3 + 1 + 50) < search.calls <= 600


def test_gepa_ends_if_its_batches_are_right_and_give_nothing_to_improve():
    """With right training answers and wrong validation answers, it spent all calls on such batches."""

    def reply(messages: list[Message]) -> str:
        asked = messages[-1]["content"]
        is_held_out = any(question.text in asked for question in VALIDATION)
        return "<answer>wrong</answer>" if is_held_out else right_answer(messages)

    search = new_search(PricedSource(reply), max_calls=3000)
    find("gepa", search)
    assert (search.optimizer_calls, search.environment_calls) == (0, 20 + 3 * PATIENCE)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_repeated_search_makes_no_new_calls(name, tmp_path):
    """After a kill, the same command finds the same prompt, and calls no source."""
    runs = []
    for _ in range(2):
        sources = [answering_task(), new_writer()]
        pools = [priced(source, tmp_path / f"journal-{n}") for n, source in enumerate(sources)]
        method(
            name,
            pools[0],
            optimizer=pools[1],
            folder=tmp_path,
            questions=TEST,
            train=TRAIN,
            validation=VALIDATION,
            calls=budget(name),
            examples=20,
        )
        runs.append((tmp_path / "large" / name / "a.txt").read_text())
    assert runs[0] == runs[1] != SEED_PROMPT
    assert not sources[0].asked and not sources[1].asked


def test_a_failed_call_stops_the_search():
    async def fail(messages: list[Message], caller: Caller) -> Reply:
        raise EnvError("HTTP 500")

    source = answering_task()
    source.attempt = fail  # type: ignore[method-assign]
    with pytest.raises(Resumable, match="environment failed in the search of searched"):
        find("gepa", new_search(source))


def test_opro_shows_the_best_instructions_worst_first_with_rounded_scores():
    others = {f"{number}?": 0.9 for number in range(17)}
    scores = {"a!": 0.1, "b!": 0.3, "c!": 0.999, "d!": 0.5, "e!": 0.72, "f!": 0.2, **others}
    shown = meta_prompt(scores, QUESTIONS[:1])
    expected = {"d!": 50, "e!": 72, "c!": 100}
    positions = [shown.index(f"instruction:\n{text}\nscore:\n{score}\n") for text, score in expected.items()]
    assert positions == sorted(positions)
    assert not any(f"{letter}!" in shown for letter in "abf")


def between_tags(reply: str) -> str | None:
    return last_between(reply, "<T>", "</T>")


@pytest.mark.parametrize(
    ("read", "reply", "prompt"),
    [
        (read_instruction, "Here: <INS> be **quick** </INS> ok", "Be quick"),
        (read_instruction, "no tags at all", "No tags at all"),
        (read_instruction, "<INS>open", "<INS>open"),
        (read_instruction, "", ""),
        (read_instruction, "Between <INS> and </INS>: <INS>Be quick</INS>", "Be quick"),
        (between_tags, "Between <T> and </T> I write: <T>Be quick</T>", "Be quick"),
        (between_tags, "<T>Be quick</T></T>", "Be quick"),
        (between_tags, "<T>Be quick</T> or <T>be sh", "Be quick"),
        (between_tags, "<T>Be quick", None),
        (between_tags, "<T> </T>", ""),
    ],
)
def test_a_new_prompt_is_read_between_its_last_marks_or_else_from_the_whole_reply(read, reply, prompt):
    """A bug: a reply that wrote about the marks first made "and" the prompt of TextGrad and OPRO."""
    assert read(reply) == prompt


FENCED = [
    ("```\nBe short.\n```", "Be short."),
    ("Here: ```\nBe quick.\n``` ok", "Be quick."),
    ("First A:\n```\nA\n```\nBetter B:\n```\nB\n```", "B"),
    ("The new prompt is:\n```\nAnswer with one na", None),
    ("```\nA\n```\nBetter:\n```\nB", None),
    ("``` \n\n```", None),
    ("```text\n```", None),
    ("```", None),
    ("", None),
    ("```text \nBe short.\n```", "Be short."),
    ("```text\r\nBe short.\r\n```", "Be short."),
    ("```Markdown\nBe short.\n```", "Be short."),
    ("```Be\nshort.```", "Be\nshort."),
    ("```\nBe\nshort.\n```", "Be\nshort."),
    ("```Be short.```", "Be short."),
    ("````\nAnswer as in ```x```.\n````", "Answer as in ```x```."),
    ("no fence at all", "no fence at all"),
]


@pytest.mark.parametrize(("reply", "prompt"), FENCED)
def test_gepa_reads_the_last_fenced_block_and_no_broken_one(reply, prompt):
    """A reply cut inside a fence became the prompt whole; two blocks were joined; a word was lost."""
    assert read_fenced_prompt(reply) == prompt


@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_optimiser_tries_a_prompt_of_a_reply_that_was_cut_by_its_length(name):
    """Without a fence or tags the whole reply is the prompt of GEPA and OPRO: a half one was adopted."""
    writer = PricedSource(lambda _: f"{PHRASE} And answer with the na", finish="length")
    search = new_search(writer=writer, max_calls=budget(name))
    assert find(name, search) == SEED_PROMPT
    assert search.optimizer_calls > 0 and search.tried == {SEED_PROMPT}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_request_to_the_optimiser_has_a_number_of_its_own(name):
    """A request that is repeated in a later step would get the old reply from the journal."""
    writer = new_writer()
    find(name, new_search(writer=writer, max_calls=budget(name)))
    assert len(set(writer.numbers)) == len(writer.numbers) > 8


def test_opro_drops_instructions_that_are_empty_too_long_tagged_or_contain_digits():
    written = ("Fine.", "", "x" * 501, "Use <INS>.", "Say 42.")
    kept = [text for text in written if is_usable(text, digits_allowed=True)]
    assert kept == ["Fine.", "Say 42."] and not is_usable("Say 42.", digits_allowed=False)


def test_textgrad_keeps_the_prompt_if_the_rewrite_has_no_tags():
    search = new_search(writer=PricedSource(lambda _: "no tags here"), max_calls=60)
    assert find("textgrad", search) == SEED_PROMPT
    assert search.environment_calls == 20 + 2 * 3, "a prompt is scored once"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_search_ends_when_no_prompt_is_new_or_none_can_score_higher(name):
    """A bug: the search continued until its limit, although it proposed and scored nothing more."""
    search = new_search(writer=PricedSource(lambda _: "<INS>Be quick.</INS>"), max_calls=5_000)
    find(name, search)
    assert search.calls < 400, "one new prompt, scored once"
    search = new_search(PricedSource(right_answer), max_calls=5_000)
    assert find(name, search) == SEED_PROMPT and search.calls == 20


def test_textgrad_shows_the_rewriter_the_prompt_and_each_conversation():
    writer = new_writer()
    long = " ".join(f"word{n}" for n in range(60))
    asyncio.run(rewrite(new_search(writer=writer), long, TRAIN[:3], update=1))
    [request] = [text for text in (asked[-1]["content"] for asked in writer.asked) if "<IMPROVED" in text]
    assert request.count(f"<LM_SYSTEM_PROMPT>{long}</LM_SYSTEM_PROMPT>") == 3
    assert request.count(f"<VARIABLE>{long}</VARIABLE>") == 1


def test_gepa_draws_parents_from_the_pareto_front_in_proportion_to_their_wins():
    """a is best on three of four questions, d on two, one of which a is too; b only ties; c is never best."""
    scores = {"a": (1, 1, 1, 0), "b": (1, 0, 0, 0), "c": (0, 0, 0, 0.5), "d": (1, 0, 0, 1)}
    rng = random.Random(0)
    drawn = [draw_parent(scores, rng) for _ in range(4000)]
    assert set(drawn) == {"a", "d"}
    assert drawn.count("a") / 4000 == pytest.approx(0.6, abs=0.03)


def test_textgrad_uses_twelve_questions_of_each_epoch_once():
    batches = endless_batches(QUESTIONS[:14], random.Random(0))
    for _ in range(10):
        assert len({question for _ in range(4) for question in next(batches)}) == 12


def test_gepa_uses_each_question_once_per_epoch_and_fills_the_last_batch():
    batches = filled_batches(QUESTIONS[:4], random.Random(0))
    for _ in range(10):
        epoch = [question for _ in range(2) for question in next(batches)]
        assert set(epoch[:4]) == set(QUESTIONS[:4])
        assert epoch[4:] == [epoch[3], epoch[2]], "filled with those that came last"


def questions(*datasets: str, count: int = 4) -> list[Question]:
    return [Question(f"{name}{n}", name, f"{name} {n}?", ("x",)) for name in datasets for n in range(count)]


def replace_search(monkeypatch, search: Callable[..., Awaitable[str]]) -> None:
    """Let `opro` search by another function."""
    monkeypatch.setitem(
        METHODS, "opro", replace(METHODS["opro"], algorithm=replace(OPRO, find_prompt=search))
    )


def test_a_prompt_is_searched_for_each_dataset_and_one_for_the_datasets_without_training_questions(
    tmp_path, monkeypatch
):
    """A bug: one prompt was searched for the whole mixture; the authors optimise for each task."""
    source = PricedSource(lambda _: "<answer>x</answer>")

    async def name_datasets(search, data) -> str:
        await search.ask_optimizer("", "write", sample=0)
        assert not search.scores, "those on another dataset's questions"
        search.questions = data.train
        await search.score("shared by all")
        return " and ".join(sorted({question.dataset for question in data.train}))

    replace_search(monkeypatch, name_datasets)
    datasets = ["a", "b", "ood"]
    answer = method(
        "opro",
        priced(source),
        folder=tmp_path,
        questions=questions(*datasets),
        train=questions("a", "b", "c"),
        validation=questions("a", "b"),
    )
    assert [messages[-1]["content"] for messages in source.asked].count("write") == 3
    source.asked.clear()
    for dataset in datasets:
        asyncio.run(answer(questions(dataset)[0], 0))
    assert [messages[0]["content"] for messages in source.asked] == ["a", "b", "a and b and c"]
    written = {path.name: path.read_text() for path in (tmp_path / "large/opro").iterdir()}
    assert written == {"a.txt": "a", "b.txt": "b", "all-questions.txt": "a and b and c"}


@pytest.mark.parametrize(
    ("validation", "searched"),
    [
        (["a"], {"a", "all-questions"}),  # no validation questions for b
        ([], {"a", "b"}),  # opro needs none
    ],
)
def test_a_dataset_needs_training_and_validation_questions_for_a_search_of_its_own(
    validation, searched, tmp_path, monkeypatch
):
    async def find(search, data) -> str:
        return "found"

    replace_search(monkeypatch, find)
    trained_on = questions("a", "b")
    settings = {"questions": trained_on, "train": trained_on, "validation": questions(*validation)}
    method("opro", priced(PricedSource(str)), folder=tmp_path, **settings)
    assert {path.stem for path in (tmp_path / "large/opro").iterdir()} == searched


@pytest.fixture
def wrong_endpoint() -> Iterator[tuple[str, list[dict]]]:
    """An endpoint that answers every question wrongly, and the bodies that were sent to it."""
    bodies: list[dict] = []

    class Handler(JsonHandler):
        def do_POST(self) -> None:
            bodies.append(self.body())
            if bodies[-1]["messages"][-1]["content"] == "Hi":
                bodies.pop()  # the check before the evaluation
            self.answer(200, body_of("<answer>no</answer>"))

    with serving(Handler) as url:
        yield f"large@{url}", bodies


@pytest.mark.parametrize("own", [{}, {"temperature": 0.7, "max_tokens": 64}])
def test_the_requests_of_an_evaluation_carry_the_fields_of_their_method(
    wrong_endpoint, tmp_path, own, monkeypatch
):
    """A bug: the task calls of the optimisers had no temperature, and --env-args was one for all methods."""
    spec, bodies = wrong_endpoint
    monkeypatch.setattr(making, "PromptSearch", search := Mock(wraps=PromptSearch))
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"id": "1", "question": "Who?", "answers": ["Anna"]}) + "\n")
    data = ["--data", file, "--train-data", file, "--val-data", file, "--optimize-calls", "9"]
    compared = ["--method", "direct", "cot", "opro", "textgrad", "gepa"]
    prices = ["--env-price", "1,1", "5,5"]
    prices += ["--optimizer-env", spec.replace("large", "writer"), "--optimize-examples", "1"]
    line = [
        *compared,
        *data,
        *prices,
        "--env",
        spec,
        "--env-args",
        json.dumps(own),
        "--out",
        tmp_path / "out",
    ]
    if own:
        line += ["--max-env-usd", "9"]
    run_here("evaluate.py", *line)
    assert search.call_args.kwargs["limit"] == 9
    assert search.call_args.kwargs["examples"] == 1
    assert {body["model"] for body in bodies} == {"large", "writer"}
    sent = defaultdict(set)
    for body in bodies:
        first = body["messages"][0]["content"]
        fields = {name: body[name] for name in body if name not in ("model", "messages")}
        sent["step by step" in str(body["messages"]), first[:10]].add(json.dumps(fields))
    assistant, seed = "You are a ", "Answer the"
    assert sent[False, assistant] == {json.dumps(own)}, "direct: the documented system message, nothing else"
    assert sent[True, assistant] == {json.dumps({**own, "temperature": 0.0})}, "cot"
    limits = ({"temperature": 0.0, "max_tokens": limit} for limit in (1024, 2000))
    opro, textgrad = (json.dumps({**own, **limit}) for limit in limits)
    assert sent[False, seed] == {opro, textgrad, json.dumps(own)}
    # A limit of dollars needs a limit of each reply, and the authors of GEPA set none.
    limits_of_writer = {body.get("max_tokens") for body in bodies if body["model"] == "writer"}
    assert limits_of_writer == ({2000} if own else {None})
    calls = map(json.loads, (tmp_path / "out/journal/rank0.jsonl").read_text().splitlines())
    ended = [call for call in calls if "usd" in call]
    prices_paid = {
        round(1e6 * call["usd"] / (call["reply"]["tokens_in"] + call["reply"]["tokens_out"]))
        for call in ended
    }
    assert prices_paid == {1, 5}, "those of the environment and of the optimiser"


def test_an_evaluation_closes_the_environment_and_the_model_that_writes_prompts(
    wrong_endpoint, tmp_path, monkeypatch
):
    spec, _ = wrong_endpoint
    closed: list[str] = []
    close = Environment.close

    async def noted(environment: Environment) -> None:
        closed.append(environment.name)
        await close(environment)

    monkeypatch.setattr(Environment, "close", noted)
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"id": "1", "question": "Who?", "answers": ["Anna"]}) + "\n")
    data = ["--data", file, "--train-data", file, "--val-data", file, "--out", tmp_path / "out"]
    search = ["--method", "opro", "--optimize-calls", "9", "--optimizer-env", spec.replace("large", "writer")]
    run_here("evaluate.py", *search, *data, "--env", spec)
    assert sorted(closed) == ["large", "writer"]
