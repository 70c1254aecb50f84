r"""A pretrained model learns to question another pretrained model. Nobody has designed its failures.

    python -m studies.cities make --out runs/cities      # questions, demonstrations, fixed wordings
    python -m prompt_r1.training.warm_start --agent smollm2 --games runs/cities/games.jsonl --out runs/warm
    python train.py --config small --max-turns 2 --agent runs/warm/agent --env smollm2 --env-system "" \
        --env-args '{"max_tokens": 32}' --test-data none \
        --data runs/cities/train.jsonl --val-data runs/cities/validation.jsonl \
        --seed 0 --out runs/cities-0
    python evaluate.py --agent runs/cities-0 --env smollm2 --env-system "" --env-args '{"max_tokens": 32}' \
        --data runs/cities/test.jsonl --train-data runs/cities/train.jsonl --optimize-calls 384 \
        --method agent-only untrained rft prompt-r1 --out ev0
    python -m studies.cities table ev0 ev1 ev2              # one folder for each seed

A question is "Zoe lives in Lisbon. Ben lives in Tunis. Ada lives in Bangkok. In which country does Ben live?"
The environment SmolLM2-135M usually fails on it. On a question about the city alone, success depends on the
wording. The agent is also SmolLM2. It starts from demonstrations that have all wordings in fixed shares,
whether they led to the right answer or not. Training, validation and test have different cities. For every
method, an answer is right if it names the right country and no other country.

This plan was made before any agent was trained. GRPO starts if at least 90 % of the warm-started agent's
requests about a single city are about the right city, and if its 8 samples contain more right answers than
the environment alone. Then `train.py --config small --max-turns 2` with seeds 0, 1 and 2 is compared with the
environment alone, the best of 20 static prompts, the untrained pair, rft with as many calls, an agent without
an environment, and each wording.
"""

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from prompt_r1.environments.asking import last_between
from prompt_r1.environments.environment import Environment
from prompt_r1.environments.local import load_local
from prompt_r1.evaluation.predictions import FILE, Prediction, read_predictions
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.tables import markdown_table
from prompt_r1.types import Message
from studies.seeds import Scores, percent, percent_by_seed

CAPITALS = """\
Kabul: Afghanistan, Tirana: Albania, Algiers: Algeria, Luanda: Angola, Buenos Aires: Argentina, \
Yerevan: Armenia, Canberra: Australia, Vienna: Austria, Baku: Azerbaijan, Nassau: Bahamas, \
Manama: Bahrain, Dhaka: Bangladesh, Bridgetown: Barbados, Minsk: Belarus, Brussels: Belgium, \
Belmopan: Belize, Thimphu: Bhutan, Sarajevo: Bosnia, Gaborone: Botswana, Brasilia: Brazil, \
Sofia: Bulgaria, Ouagadougou: Burkina Faso, Gitega: Burundi, Phnom Penh: Cambodia, Ottawa: Canada, \
Beijing: China, Santiago: Chile, Bogota: Colombia, Zagreb: Croatia, Havana: Cuba, Nicosia: Cyprus, \
Copenhagen: Denmark, Quito: Ecuador, Cairo: Egypt, Asmara: Eritrea, Tallinn: Estonia, \
Addis Ababa: Ethiopia, Suva: Fiji, Helsinki: Finland, Paris: France, Libreville: Gabon, Tbilisi: Georgia, \
Berlin: Germany, Accra: Ghana, Athens: Greece, Conakry: Guinea, Georgetown: Guyana, \
Tegucigalpa: Honduras, Budapest: Hungary, Reykjavik: Iceland, New Delhi: India, Jakarta: Indonesia, \
Tehran: Iran, Baghdad: Iraq, Dublin: Ireland, Jerusalem: Israel, Rome: Italy, Kingston: Jamaica, \
Tokyo: Japan, Amman: Jordan, Astana: Kazakhstan, Nairobi: Kenya, Bishkek: Kyrgyzstan, Vientiane: Laos, \
Riga: Latvia, Beirut: Lebanon, Maseru: Lesotho, Monrovia: Liberia, Tripoli: Libya, Vilnius: Lithuania, \
Antananarivo: Madagascar, Lilongwe: Malawi, Kuala Lumpur: Malaysia, Male: Maldives, Bamako: Mali, \
Valletta: Malta, Nouakchott: Mauritania, Port Louis: Mauritius, Chisinau: Moldova, Ulaanbaatar: Mongolia, \
Podgorica: Montenegro, Rabat: Morocco, Maputo: Mozambique, Windhoek: Namibia, Kathmandu: Nepal, \
Amsterdam: Netherlands, Wellington: New Zealand, Managua: Nicaragua, Abuja: Nigeria, \
Pyongyang: North Korea, Oslo: Norway, Muscat: Oman, Islamabad: Pakistan, Port Moresby: Papua New Guinea, \
Asuncion: Paraguay, Lima: Peru, Manila: Philippines, Warsaw: Poland, Lisbon: Portugal, Doha: Qatar, \
Bucharest: Romania, Moscow: Russia, Kigali: Rwanda, Riyadh: Saudi Arabia, Dakar: Senegal, \
Belgrade: Serbia, Freetown: Sierra Leone, Bratislava: Slovakia, Ljubljana: Slovenia, Mogadishu: Somalia, \
Pretoria: South Africa, Seoul: South Korea, Madrid: Spain, Khartoum: Sudan, Paramaribo: Suriname, \
Stockholm: Sweden, Bern: Switzerland, Damascus: Syria, Taipei: Taiwan, Dushanbe: Tajikistan, \
Dodoma: Tanzania, Bangkok: Thailand, Lome: Togo, Tunis: Tunisia, Ankara: Turkey, Kampala: Uganda, \
Kyiv: Ukraine, Montevideo: Uruguay, Tashkent: Uzbekistan, Caracas: Venezuela, Hanoi: Vietnam, \
Sanaa: Yemen, Lusaka: Zambia, Harare: Zimbabwe"""
CITIES = dict(pair.split(": ") for pair in CAPITALS.split(", "))  # capital → country
COUNTRY = re.compile(rf"\b({'|'.join(sorted(CITIES.values(), key=len, reverse=True))})\b")
NAMES = "Zoe Ben Ada Tom Mia Sam Eva Max Lily Jack Nora Paul".split()
# Split → its part of the shuffled cities, and split → questions about each of its cities.
SPLITS = {"train": (0, 58), "validation": (58, 74), "test": (74, 134)}
PER_CITY = {"train": 6, "validation": 1, "test": 1}
DEMONSTRATIONS = 80
OTHER = "other wordings"
REPLY_TOKENS = 32

# The demonstrations: wording → share, thought and prompt. {other} is the city of another person.
WORDINGS = {
    "as it is": (0.25, "I ask it as it is.", "{text}"),
    "tell": (0.15, "{name} lives in {city}.", "Tell me about {city}."),
    "where": (0.15, "{name} lives in {city}.", "Where is {city}?"),
    "in": (0.15, "{name} lives in {city}.", "In which country is {city}?"),
    "capital": (0.15, "{name} lives in {city}.", "{city} is the capital of which country?"),
    "wrong person": (0.15, "{name} lives in {other}.", "In which country is {other}?"),
}
# Static prompts: the text before and after the question. The best prompt on 40 training questions is tested.
STATIC = [
    (before, after)
    for before in ("", "Think step by step. ", "Answer with the name of a country only. ", "Read carefully. ")
    for after in (
        "",
        " First name the city.",
        " Name one country.",
        " The country is",
        " Answer in one word.",
    )
]

Marks = dict[str, float]
"""Question → 1 if the reply was right, else 0."""


@dataclass(frozen=True)
class Case:
    """A question, and the names from which a script makes prompts about it."""

    text: str
    name: str
    city: str
    other: str

    @property
    def row(self) -> dict[str, object]:
        return {"question": self.text, "answers": [CITIES[self.city]]}

    def prompt(self, wording: str) -> str:
        _, _, prompt = WORDINGS[wording]
        return prompt.format(**vars(self))


def cases_of(split: str) -> list[Case]:
    """The questions of a split. They are about each of its cities in turn."""
    first, end = SPLITS[split]
    cities = random.Random("cities").sample(list(CITIES), len(CITIES))[first:end]
    rng = random.Random(split)
    cases = []
    for city in cities * PER_CITY[split]:
        names = rng.sample(NAMES, 3)
        homes = [city, *rng.sample([other for other in cities if other != city], 2)]
        cases.append(case_of(names, homes, rng))
    return cases


def case_of(names: Sequence[str], homes: Sequence[str], rng: random.Random) -> Case:
    """A question about the first of three people. `homes` are the cities in which they live."""
    facts = [f"{name} lives in {home}." for name, home in zip(names, homes, strict=True)]
    shuffled = rng.sample(facts, len(facts))
    text = " ".join([*shuffled, f"In which country does {names[0]} live?"])
    return Case(text, names[0], homes[0], other=homes[1])


def cities_in(text: str) -> set[str]:
    """The cities that a text names."""
    return {city for city in CITIES if re.search(rf"\b{city}\b", text)}


def names_only(answer: str | None, country: str) -> bool:
    """Whether an answer names this country and no other."""
    return set(COUNTRY.findall(answer or "")) == {country}


async def ask_all(environment: Environment, prompts: Sequence[str]) -> list[str]:
    """Ask all prompts at once. Returns the replies."""
    calls = [environment.ask([Message(role="user", content=prompt)]) for prompt in prompts]
    return [reply.text for reply in await asyncio.gather(*calls)]


async def demonstrate(environment: Environment, cases: Sequence[Case]) -> list[dict[str, object]]:
    """A game for each case: a wording, drawn by its share, and the country that the reply names."""
    shares = [share for share, _, _ in WORDINGS.values()]
    drawn = random.Random("demonstrations").choices(list(WORDINGS), shares, k=len(cases))
    prompts = [case.prompt(wording) for case, wording in zip(cases, drawn, strict=True)]
    replies = await ask_all(environment, prompts)
    games: list[dict[str, object]] = []
    for case, wording, prompt, reply in zip(cases, drawn, prompts, replies, strict=True):
        _, thought, _ = WORDINGS[wording]
        think = thought.format(**vars(case))
        named = COUNTRY.findall(reply)
        if named:
            known, answer = "Now I know the answer.", named[0]
        else:
            known, answer = "It names no country.", "unknown"
        first = f"<think>{think}</think>\n<interaction_prompt>{prompt}</interaction_prompt>"
        last = f"<think>{known}</think>\n<answer>{answer}</answer>"
        turns = [{"text": first, "reply": reply}, {"text": last, "reply": None}]
        games.append({"question": case.text, "turns": turns})
    return games


async def make(folder: Path) -> None:
    """Write the questions and demonstrations, and print how often fixed wordings are right."""
    source = load_local(
        "smollm2",
        fields={"max_tokens": REPLY_TOKENS},
        system="",
        seed=0,
        slots=16,
        device=torch.device("cpu"),
    )
    environment = Environment([source])
    train, test = cases_of("train"), cases_of("test")
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        write_lines(folder / f"{split}.jsonl", [case.row for case in cases_of(split)])
    write_lines(folder / "games.jsonl", await demonstrate(environment, train[:DEMONSTRATIONS]))
    rows = await measure_wordings(environment, train, test)
    rows.append(await measure_static_prompts(environment, train, test))
    print(markdown_table(["wording", "training, % [95 %]", "test, % [95 %]"], rows))


def write_lines(path: Path, lines: Sequence[dict[str, object]]) -> None:
    """Write a JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


async def marks_of(environment: Environment, cases: Sequence[Case], prompts: Sequence[str]) -> Marks:
    """Ask one prompt for each case, and mark the replies."""
    replies = await ask_all(environment, prompts)
    marks = {}
    for case, reply in zip(cases, replies, strict=True):
        marks[case.text] = float(names_only(reply, CITIES[case.city]))
    return marks


async def measure_wordings(
    environment: Environment, train: Sequence[Case], test: Sequence[Case]
) -> list[list[str]]:
    """A row for each wording, and a row for the best wording of each question."""
    _, count = SPLITS["train"]
    once = train[:count]  # the first question about each city
    rows = []
    best_train: Marks = {}
    best_test: Marks = {}
    for wording in WORDINGS:
        of_train = await marks_of(environment, once, [case.prompt(wording) for case in once])
        of_test = await marks_of(environment, test, [case.prompt(wording) for case in test])
        rows.append([wording, _percent(of_train), _percent(of_test)])
        best_train = {text: max(mark, best_train.get(text, 0.0)) for text, mark in of_train.items()}
        best_test = {text: max(mark, best_test.get(text, 0.0)) for text, mark in of_test.items()}
    rows.append(["the best wording of each question", _percent(best_train), _percent(best_test)])
    return rows


async def measure_static_prompts(
    environment: Environment, train: Sequence[Case], test: Sequence[Case]
) -> list[str]:
    """A row for the static prompt that is best on 40 training questions."""
    chosen_on = train[:40]
    found = {}
    for before, after in STATIC:
        prompts = [before + case.text + after for case in chosen_on]
        found[before, after] = await marks_of(environment, chosen_on, prompts)
    before, after = max(found, key=lambda pair: sum(found[pair].values()))
    of_test = await marks_of(environment, test, [before + case.text + after for case in test])
    return [f"static prompt: {before}…{after}", _percent(found[before, after]), _percent(of_test)]


def _percent(marks: Marks) -> str:
    return percent({(0, ""): marks})


def requests_of(predictions: Sequence[Prediction], cases: dict[str, Case]) -> str:
    """Describe the games' first requests.

    The text has the share about a single city, of these the share about the right city, and the wordings.
    """
    about_one = 0
    right: Counter[str] = Counter()
    for prediction in predictions:
        case = cases[prediction.question.text]
        request = last_between(prediction.raw, "<interaction_prompt>", "</interaction_prompt>") or ""
        cities = cities_in(request)
        if len(cities) == 1:
            about_one += 1
        if cities == {case.city}:
            right[wording_of(request, case)] += 1
    correct = right.total()
    shown = [f"{name} {right[name] / correct:.0%}" for name in [*WORDINGS, OTHER] if right[name]]
    share = about_one / len(predictions)
    return f"{share:.0%}; of these {correct / max(about_one, 1):.0%}: {', '.join(shown)}"


def wording_of(request: str, case: Case) -> str:
    """The name in WORDINGS of the wording that a request about a case has, or OTHER."""
    for wording in WORDINGS:
        if request == case.prompt(wording):
            return wording
    return OTHER


def table(folders: Sequence[Path]) -> str:
    """A table with a row for each method: right answers (in all, by seed, in any sample), and requests."""
    answers = [read_predictions(folder / FILE) for folder in folders]
    cases = {case.text: case for split in SPLITS for case in cases_of(split)}
    methods = dict.fromkeys(one.system.method for of_seed in answers for one in of_seed)
    rows = []
    for method in methods:
        means: Scores = {}
        any_right: Scores = {}
        played: list[Prediction] = []
        for number, of_seed in enumerate(answers):
            own = [one for one in of_seed if one.system.method == method]
            if not own:
                continue
            marks: dict[str, list[float]] = {}
            for one in own:
                mark = float(names_only(one.answer, one.question.answers[0]))
                marks.setdefault(one.question.text, []).append(mark)
            means[number, ""] = {text: fmean(each) for text, each in marks.items()}
            any_right[number, ""] = {text: max(each) for text, each in marks.items()}
            played += own
        row = [method, percent(means), percent_by_seed(means), percent(any_right)]
        rows.append([*row, requests_of(played, cases)])
    requests = "first requests about one city; of these the right one: its wordings"
    return markdown_table(["method", "right, % [95 %]", "by seed", "any sample right", requests], rows)


def main(arguments: list[str]) -> None:
    """Make the study's files, or print its table."""
    parser = argparse.ArgumentParser("python -m studies.cities", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make").add_argument("--out", type=Path, required=True)
    commands.add_parser("table").add_argument("folder", type=Path, nargs="+", help="--out of evaluate.py")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.command == "make":
        asyncio.run(make(given.out))
    else:
        print(table(given.folder))


if __name__ == "__main__":
    run_program(main, sys.argv[1:])
