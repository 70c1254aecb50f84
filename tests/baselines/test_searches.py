"""What the searches are for (each dataset), and what every method sends with its requests."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator

import pytest

import evaluate
from prompt_r1.baselines.ask_once import FORMATS
from prompt_r1.baselines.optimise import PromptSearch, optimised_prompt
from prompt_r1.types import Question
from tests.support.json_server import JsonHandler, serving
from tests.support.methods import PricedSource, priced
from tests.support.providers import body_of


def questions(*datasets: str, count: int = 4) -> list[Question]:
    return [Question(f"{name}{n}", name, f"{name} {n}?", ("x",)) for name in datasets for n in range(count)]


def test_a_prompt_is_searched_for_each_dataset_and_one_for_the_datasets_without_training_questions(tmp_path):
    """A bug: one prompt was searched for the whole mixture; the authors optimise for each task."""
    source = PricedSource(lambda _: "<answer>x</answer>")
    environment = priced(source)

    async def name_datasets(search, train, validation) -> str:
        await search.ask_optimizer("", "write")
        return " and ".join(sorted({question.dataset for question in train}))

    search = PromptSearch("opro", environment, environment, FORMATS["tags"])
    asked, datasets = (questions("a", "b", "c"), questions("a", "b")), ["a", "b", "ood"]
    answer = asyncio.run(optimised_prompt(name_datasets, lambda _: search, datasets, tmp_path, *asked))
    assert len(source.asked) == 3
    source.asked.clear()
    for dataset in datasets:
        asyncio.run(answer(questions(dataset)[0], sample=0, seed=""))
    assert [messages[0]["content"] for messages in source.asked] == ["a", "b", "a and b and c"]
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"a.txt": "a", "b.txt": "b", "all-questions.txt": "a and b and c"}


@pytest.mark.parametrize(
    ("validation", "searched"),
    [
        (["a"], {"a", "all-questions"}),  # no validation questions for b
        ([], {"a", "b"}),  # opro needs none
    ],
)
def test_a_dataset_needs_training_and_validation_questions_for_a_search_of_its_own(
    validation, searched, tmp_path
):
    async def find(search, train, validation) -> str:
        return "found"

    unasked = priced(PricedSource(str))
    search = PromptSearch("opro", unasked, unasked, FORMATS["tags"])
    asked = questions("a", "b"), questions(*validation)
    asyncio.run(optimised_prompt(find, lambda _: search, ["a", "b"], tmp_path, *asked))
    assert {path.stem for path in tmp_path.iterdir()} == searched


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[dict]]]:
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


def test_the_requests_of_an_evaluation_carry_the_fields_of_their_method(endpoint, tmp_path):
    """A bug: the task calls of the optimisers had no temperature, and --env-args was one for all methods."""
    spec, bodies = endpoint
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"id": "1", "question": "Who?", "answers": ["Anna"]}) + "\n")
    data = ["--data", file, "--train-data", file, "--val-data", file, "--optimize-calls", "9"]
    methods = ["--method", "direct", "cot", "opro", "textgrad", "gepa"]
    line = [*methods, *data, "--env", spec, "--out", tmp_path / "out"]
    evaluate.main([str(part) for part in line])
    sent = defaultdict(set)
    for body in bodies:
        first = body["messages"][0]["content"]
        fields = {name: body[name] for name in body if name not in ("model", "messages")}
        sent["step by step" in str(body["messages"]), first[:10]].add(json.dumps(fields))
    assistant, seed = "You are a ", "Answer the"
    assert sent[False, assistant] == {"{}"}, "direct: the documented system message, nothing else"
    assert sent[True, assistant] == {'{"temperature": 0.0}'}, "cot"
    opro, textgrad = (json.dumps({"temperature": 0.0, "max_tokens": limit}) for limit in (1024, 2000))
    assert sent[False, seed] == {opro, textgrad, "{}"}
