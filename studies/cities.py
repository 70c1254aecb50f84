r"""A pretrained model learns how to question a pretrained model, whose failures nobody wrote.

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

"Zoe lives in Lisbon. Ben lives in Tunis. Ada lives in Bangkok. In which country does Ben live?" Asked this,
the environment SmolLM2-135M usually fails; asked about the one city, it depends on the wording. The agent,
SmolLM2 too, starts from demonstrations of all wordings in fixed shares, whether they led to the right answer
or not. Training, validation and test have different cities. For every method, an answer is right if it names
the right country and no other.

The plan, made before any agent was trained: GRPO starts if the warm-started agent asks about the right city
in at least .9 of its requests about one, and has more right in 8 samples than the environment alone. Then
`train.py --config small --max-turns 2`, seeds 0, 1 and 2, is compared with the environment alone, the best of
20 static prompts, the untrained pair, rft at as many calls, an agent without environment, and each wording.
"""

import argparse
import asyncio
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from prompt_r1.environments.environment import Environment
from prompt_r1.environments.local import load_local
from prompt_r1.evaluation.predictions import FILE, Prediction, read_predictions
from prompt_r1.programs.command_line import run_program
from prompt_r1.programs.tables import markdown_table
from prompt_r1.types import Message
from studies.seeds import percent

CAPITALS = """\
Kabul Afghanistan|Tirana Albania|Algiers Algeria|Luanda Angola|Buenos Aires Argentina|Yerevan Armenia|\
Canberra Australia|Vienna Austria|Baku Azerbaijan|Nassau Bahamas|Manama Bahrain|Dhaka Bangladesh|\
Bridgetown Barbados|Minsk Belarus|Brussels Belgium|Belmopan Belize|Thimphu Bhutan|Sarajevo Bosnia|\
Gaborone Botswana|Brasilia Brazil|Sofia Bulgaria|Ouagadougou Burkina Faso|Gitega Burundi|\
Phnom Penh Cambodia|Ottawa Canada|Beijing China|Santiago Chile|Bogota Colombia|Zagreb Croatia|Havana Cuba|\
Nicosia Cyprus|Copenhagen Denmark|Quito Ecuador|Cairo Egypt|Asmara Eritrea|Tallinn Estonia|\
Addis Ababa Ethiopia|Suva Fiji|Helsinki Finland|Paris France|Libreville Gabon|Tbilisi Georgia|\
Berlin Germany|Accra Ghana|Athens Greece|Conakry Guinea|Georgetown Guyana|Tegucigalpa Honduras|\
Budapest Hungary|Reykjavik Iceland|New Delhi India|Jakarta Indonesia|Tehran Iran|Baghdad Iraq|\
Dublin Ireland|Jerusalem Israel|Rome Italy|Kingston Jamaica|Tokyo Japan|Amman Jordan|Astana Kazakhstan|\
Nairobi Kenya|Bishkek Kyrgyzstan|Vientiane Laos|Riga Latvia|Beirut Lebanon|Maseru Lesotho|Monrovia Liberia|\
Tripoli Libya|Vilnius Lithuania|Antananarivo Madagascar|Lilongwe Malawi|Kuala Lumpur Malaysia|Male Maldives|\
Bamako Mali|Valletta Malta|Nouakchott Mauritania|Port Louis Mauritius|Chisinau Moldova|Ulaanbaatar Mongolia|\
Podgorica Montenegro|Rabat Morocco|Maputo Mozambique|Windhoek Namibia|Kathmandu Nepal|Amsterdam Netherlands|\
Wellington New Zealand|Managua Nicaragua|Abuja Nigeria|Pyongyang North Korea|Oslo Norway|Muscat Oman|\
Islamabad Pakistan|Port Moresby Papua New Guinea|Asuncion Paraguay|Lima Peru|Manila Philippines|\
Warsaw Poland|Lisbon Portugal|Doha Qatar|Bucharest Romania|Moscow Russia|Kigali Rwanda|Riyadh Saudi Arabia|\
Dakar Senegal|Belgrade Serbia|Freetown Sierra Leone|Bratislava Slovakia|Ljubljana Slovenia|\
Mogadishu Somalia|Pretoria South Africa|Seoul South Korea|Madrid Spain|Khartoum Sudan|Paramaribo Suriname|\
Stockholm Sweden|Bern Switzerland|Damascus Syria|Taipei Taiwan|Dushanbe Tajikistan|Dodoma Tanzania|\
Bangkok Thailand|Lome Togo|Tunis Tunisia|Ankara Turkey|Kampala Uganda|Kyiv Ukraine|Montevideo Uruguay|\
Tashkent Uzbekistan|Caracas Venezuela|Hanoi Vietnam|Sanaa Yemen|Lusaka Zambia|Harare Zimbabwe"""

# Only these capitals have two words.
CITY = re.compile("Buenos Aires|Addis Ababa|Phnom Penh|New Delhi|Kuala Lumpur|Port Louis|Port Moresby|\\w+")
CITIES = {city: pair[len(city) + 1 :] for pair in CAPITALS.split("|") for city in CITY.findall(pair)[:1]}
COUNTRY = re.compile(rf"\b({'|'.join(sorted(CITIES.values(), key=len, reverse=True))})\b")
NAMES = "Zoe Ben Ada Tom Mia Sam Eva Max Lily Jack Nora Paul".split()
SPLITS = {"train": (0, 58), "validation": (58, 74), "test": (74, 134)}
PER_CITY = {"train": 6, "validation": 1, "test": 1}  # questions
DEMONSTRATIONS = 80
REPLY_TOKENS = 32

# What the agent is shown: share, thought and prompt. {other} is another person's city.
WORDINGS = {
    "as it is": (0.25, "I ask it as it is.", "{text}"),
    "tell": (0.15, "{name} lives in {city}.", "Tell me about {city}."),
    "where": (0.15, "{name} lives in {city}.", "Where is {city}?"),
    "in": (0.15, "{name} lives in {city}.", "In which country is {city}?"),
    "capital": (0.15, "{name} lives in {city}.", "{city} is the capital of which country?"),
    "wrong person": (0.15, "{name} lives in {other}.", "In which country is {other}?"),
}
# Static prompts: what stands before and after the question. The best on 40 training questions is tested.
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


@dataclass(frozen=True)
class Case:
    """A question, and what a script needs to ask about it."""

    text: str
    name: str
    city: str
    other: str

    @property
    def row(self) -> dict[str, object]:
        return {"question": self.text, "answers": [CITIES[self.city]]}

    def prompt(self, wording: str) -> str:
        return WORDINGS[wording][2].format(**vars(self))


def cases_of(split: str) -> list[Case]:
    """The questions of a split, about each of its cities in turn."""
    cities = random.Random("cities").sample(list(CITIES), len(CITIES))
    cities = cities[slice(*SPLITS[split])]
    rng, cases = random.Random(split), []
    for city in cities * PER_CITY[split]:
        names = rng.sample(NAMES, 3)
        lives = [city, *rng.sample([other for other in cities if other != city], 2)]
        facts = [f"{name} lives in {where}." for name, where in zip(names, lives, strict=True)]
        text = " ".join([*rng.sample(facts, 3), f"In which country does {names[0]} live?"])
        cases.append(Case(text, names[0], city, lives[1]))
    return cases


def is_right(answer: str | None, country: str) -> bool:
    """Whether an answer names this country and no other."""
    return set(COUNTRY.findall(answer or "")) == {country}


async def ask_all(environment: Environment, prompts: Sequence[str]) -> list[str]:
    """The replies to prompts."""
    asked = [environment.ask([Message(role="user", content=prompt)]) for prompt in prompts]
    return await asyncio.gather(*asked)


async def demonstrate(environment: Environment, cases: Sequence[Case]) -> list[dict[str, object]]:
    """A game of each case: a wording drawn by its share, and the country that the reply names."""
    shares = [share for share, _, _ in WORDINGS.values()]
    drawn = random.Random("demonstrations").choices(list(WORDINGS), shares, k=len(cases))
    prompts = [case.prompt(wording) for case, wording in zip(cases, drawn, strict=True)]
    games: list[dict[str, object]] = []
    for case, wording, prompt, reply in zip(
        cases, drawn, prompts, await ask_all(environment, prompts), strict=True
    ):
        named = COUNTRY.findall(reply)
        think = WORDINGS[wording][1].format(**vars(case))
        ask = f"<think>{think}</think>\n<interaction_prompt>{prompt}</interaction_prompt>"
        known = "Now I know the answer." if named else "It names no country."
        answer = f"<think>{known}</think>\n<answer>{named[0] if named else 'unknown'}</answer>"
        turns = [{"text": ask, "reply": reply}, {"text": answer, "reply": None}]
        games.append({"question": case.text, "turns": turns})
    return games


async def make(folder: Path) -> None:
    """Write the questions and demonstrations, and print what fixed wordings reach."""
    source = load_local(
        "smollm2",
        fields={"max_tokens": REPLY_TOKENS},
        system="",
        seed=0,
        slots=16,
        device=torch.device("cpu"),
    )
    environment, cases = Environment([source]), {split: cases_of(split) for split in SPLITS}
    folder.mkdir(parents=True, exist_ok=True)
    rows = {split: [case.row for case in of] for split, of in cases.items()}
    rows["games"] = await demonstrate(environment, cases["train"][:DEMONSTRATIONS])
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def marks(of: Sequence[Case], prompts: Sequence[str]) -> dict[str, float]:
        replies = await ask_all(environment, prompts)
        paired = zip(of, replies, strict=True)
        return {case.text: float(is_right(reply, CITIES[case.city])) for case, reply in paired}

    once, tested = cases["train"][: SPLITS["train"][1]], cases["test"]
    found = {}
    for wording in WORDINGS:
        scores = [await marks(of, [case.prompt(wording) for case in of]) for of in (once, tested)]
        found[wording] = scores
    best = [{key: max(of[at][key] for of in found.values()) for key in found["in"][at]} for at in (0, 1)]
    found["the best wording of each question"] = best
    static = {}
    for before, after in STATIC:
        static[before, after] = await marks(once[:40], [before + case.text + after for case in once[:40]])
    before, after = max(static, key=lambda pair: sum(static[pair].values()))
    of_test = await marks(tested, [before + case.text + after for case in tested])
    found[f"static prompt: {before}…{after}"] = [static[before, after], of_test]
    shown = [[name, *(percent({(0, ""): of}) for of in scores)] for name, scores in found.items()]
    print(markdown_table(["wording", "training, % [95 %]", "test, % [95 %]"], shown))


def requests_of(predictions: Sequence[Prediction], cases: dict[str, Case]) -> str:
    """Of the first requests of the games, those about one city; of these, the right one, by wording."""
    about, right = 0, dict.fromkeys([*WORDINGS, "other wordings"], 0)
    for one in predictions:
        case = cases[one.question.text]
        asked = one.raw.partition("<interaction_prompt>")[2].partition("</interaction_prompt>")[0].strip()
        cities = {city for city in CITIES if re.search(rf"\b{city}\b", asked)}
        about += len(cities) == 1
        if cities == {case.city}:
            wording = [name for name in WORDINGS if asked == case.prompt(name)] or ["other wordings"]
            right[wording[0]] += 1
    correct = sum(right.values())
    wordings = ", ".join(f"{name} {count / correct:.0%}" for name, count in right.items() if count)
    return f"{about / len(predictions):.0%}; of these {correct / max(about, 1):.0%}: {wordings}"


def table(folders: Sequence[Path]) -> str:
    """A row for each method: the share of right answers, also by seed and in any sample, and its requests."""
    answers = [read_predictions(folder / FILE) for folder in folders]
    cases = {case.text: case for split in SPLITS for case in cases_of(split)}
    rows = []
    for method in dict.fromkeys(one.system.method for of in answers for one in of):
        scores, played = {}, []
        for number, of in enumerate(answers):
            own = [one for one in of if one.system.method == method]
            marks: dict[str, list[bool]] = {}
            for one in own:
                marks.setdefault(one.question.text, []).append(is_right(one.answer, one.question.answers[0]))
            if own:
                scores[number, ""] = {key: sum(each) / len(each) for key, each in marks.items()}
                scores[number, "any"] = {key: float(any(each)) for key, each in marks.items()}
            played += own
        single, any_of = ({key: of for key, of in scores.items() if key[1] == name} for name in ("", "any"))
        seeds = ", ".join(f"{100 * sum(of.values()) / len(of):.1f}" for of in single.values())
        rows.append([method, percent(single), seeds, percent(any_of), requests_of(played, cases)])
    return markdown_table(
        [
            "method",
            "right, % [95 %]",
            "by seed",
            "any sample right",
            "first requests about one city; of these the right one: its wordings",
        ],
        rows,
    )


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
