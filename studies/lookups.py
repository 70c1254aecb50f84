"""The questions, folds and demonstrations of `studies.wordings`, which has the plan."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from studies.cities import CITIES, COUNTRY, NAMES, Case, case_of, cities_in

# The wordings of a request about one city.
WORDINGS = {
    "tell": "Tell me about {city}.",
    "where": "Where is {city}?",
    "in": "In which country is {city}?",
    "capital": "{city} is the capital of which country?",
    "sentence": "{name} lives in {city}. In which country does {name} live?",
}
TESTED = 3  # questions about each test city
WRONG = 64  # One of so many demonstrations is about the city of another person.
TWO_PEOPLE = (1, 2, 4, 7)  # Of 8 demonstrations in a row, these are about two people.
# Made-up names consist of these.
BEGINNINGS = "b br d f g gr k l m n p r s st t tr v z".split()
VOWELS = "a e i o u ai ei".split()
ENDS = ("", "n", "r", "s", "ra", "nt")


@dataclass(frozen=True)
class Fold:
    """The cities of a fold by their use, and its questions."""

    number: int
    test_cities: Sequence[str]
    validation_cities: Sequence[str]
    shown_cities: Sequence[str]
    unseen_cities: Sequence[str]

    @property
    def train(self) -> list[Case]:
        return cases_about([*self.shown_cities, *self.unseen_cities], 6, f"train {self.number}")

    @property
    def validation(self) -> list[Case]:
        return cases_about(self.validation_cities, 2, f"validation {self.number}")

    @property
    def test(self) -> list[Case]:
        return cases_about(self.test_cities, TESTED, f"test {self.number}")

    @property
    def gate(self) -> list[Case]:
        return cases_about(self.unseen_cities, 1, f"gate {self.number}")

    @property
    def choice(self) -> list[Case]:
        """A question about each city that is not tested, for scripts that choose."""
        cities = [*self.unseen_cities, *self.shown_cities, *self.validation_cities]
        return cases_about(cities, 1, f"choice {self.number}")


def fold_of(number: int, cities: Sequence[str], seed: str = "folds") -> Fold:
    """Divide the cities of a fold."""
    shuffled = random.Random(seed).sample(cities, len(cities))
    test = shuffled[number::3]
    rest = [city for city in shuffled if city not in test]
    shown_from = len(cities) // 8
    unseen_from = shown_from + len(cities) // 5
    return Fold(number, test, rest[:shown_from], rest[shown_from:unseen_from], rest[unseen_from:])


def cases_about(cities: Sequence[str], times: int, seed: str) -> list[Case]:
    """Questions about each city in turn, `times` about each. The other two cities are of the same list."""
    rng = random.Random(seed)
    cases = []
    for city in [*cities] * times:
        others = rng.sample([other for other in cities if other != city], 2)
        cases.append(case_of(rng.sample(NAMES, 3), [city, *others], rng))
    return cases


def prompt_of(case: Case, wording: str) -> str:
    """A request about the city of a case."""
    return WORDINGS[wording].format(name=case.name, city=case.city)


def first_country(text: str | None) -> str:
    """The first country that a text names, or ""."""
    found = COUNTRY.search(text or "")
    return found.group() if found else ""


def by_text(cases: Iterable[Case]) -> dict[str, Case]:
    """Text of the question → case."""
    return {case.text: case for case in cases}


def is_right(case: Case, text: str | None) -> bool:
    """Whether the first country in an answer is the right one."""
    return first_country(text) == CITIES[case.city]


def is_about(request: str, case: Case) -> bool:
    """Whether a request names the city of a case and no other."""
    return cities_in(request) == {case.city}


def wording_of(request: str, case: Case) -> str:
    """The name of the wording of a request, or "other wordings"."""
    for name in WORDINGS:
        if request == prompt_of(case, name):
            return name
    return "other wordings"


# The warm start.


def invent(rng: random.Random) -> str:
    """The name of a person or city that does not exist."""
    syllables = [rng.choice(BEGINNINGS) + rng.choice(VOWELS) for _ in range(2)]
    return ("".join(syllables) + rng.choice(ENDS)).capitalize()


@dataclass(frozen=True)
class Request:
    """What the agent thinks and asks in a turn."""

    thought: str
    prompt: str


@dataclass(frozen=True)
class Shown:
    """A question of the warm start, and the requests of its game."""

    question: str
    requests: Sequence[Request]


def lookups(shown: Sequence[str], count: int, seed: str) -> list[Shown]:
    """The warm start without its replies. In every second game the cities are made up."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        names = [invent(rng) for _ in range(3)]
        homes = [invent(rng) for _ in range(3)]
        if number % 2:
            homes = rng.sample(shown, 3)
        question = case_of(names, homes, rng).text
        asked = homes[:1]
        if number % 8 in TWO_PEOPLE:
            question += f" And {names[1]}?"
            asked = homes[:2]
        elif number % WRONG == 0:
            asked = homes[1:2]
        # Neither wording depends on the other.
        wordings = (number % len(WORDINGS), number // 8 % len(WORDINGS))
        requests = []
        for name, city, wording in zip(names, asked, wordings, strict=False):
            prompt = list(WORDINGS.values())[wording].format(name=name, city=city)
            requests.append(Request(f"{name} lives in {city}.", prompt))
        made.append(Shown(question, requests))
    return made


def demonstration(shown: Shown, replies: Mapping[str, str]) -> dict[str, object]:
    """A game of the warm start. Only games about two people may have an answer."""
    turns: list[dict[str, str | None]] = []
    for request in shown.requests:
        asked = f"<interaction_prompt>{request.prompt}</interaction_prompt>"
        text = f"<think>{request.thought}</think>\n{asked}"
        turns.append({"text": text, "reply": replies[request.prompt]})
    country = first_country(turns[-1]["reply"])
    if len(turns) > 1 and country:
        text = f"<think>Now I know the answer.</think>\n<answer>{country}</answer>"
        turns.append({"text": text, "reply": None})
    return {"question": shown.question, "turns": turns}
