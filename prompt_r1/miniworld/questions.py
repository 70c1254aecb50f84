"""The questions about a mini world, and their gold answers.

There are seven kinds of questions:

| kind       | stands for      | example                                                                     |
|------------|-----------------|-----------------------------------------------------------------------------|
| bridge     | 2Wiki, MuSiQue  | Who is the mother of the director of Silver River?                          |
| compare    | HotpotQA        | Was Silver River released before Paper Dream?                               |
| pop        | PopQA           | Any idea who made Silver River?                                             |
| math       | GSM8K           | Problem: Mia has 44 coins, finds 12 more and then loses 7. How many coins … |
| gen        | BookSum, XSum   | Write a short summary of Silver River.                                      |
| bridge_ood | MuSiQue         | pairs of relations that no training question has                            |
| math_ood   | MathQA          | pairs of verbs that no training question has                                |

The *slots* of a question hold its meaning, such as Compare("Silver River", "Paper Dream"); its text is one of
several wordings. The slots alone decide the split, so the splits are disjoint, whatever the number of
questions drawn.
"""

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from prompt_r1.errors import UsageError
from prompt_r1.miniworld.world import CREW, PERSON_RELATIONS, World, make_world
from prompt_r1.types import Kind, Question

SPLITS = {"train": 4096, "validation": 160, "test": 320, "ood": 128}  # split → its number of questions
TRAINING_MIX = {"bridge": 0.25, "compare": 0.28, "pop": 0.18, "math": 0.16, "gen": 0.13}
PARTS = (*SPLITS, *TRAINING_MIX)  # PART of --data mini:PART
OOD_KINDS = ("bridge_ood", "math_ood")
SCORED_AS: Mapping[str, Kind] = {"gen": "text", "math": "math", "math_ood": "math"}  # Other kinds are qa.

# Pairs of a first and a second relation (or verb) that no training question has. Training questions have each
# of these relations and verbs in the same place, but in other pairs.
OOD_RELATIONS = (("director", "teacher"), ("composer", "birthplace"), ("star", "spouse"))
OOD_VERBS = (("finds", "sells"), ("buys", "finds"), ("loses", "buys"), ("sells", "loses"))
SIGNS = {"finds": "plus", "buys": "plus", "loses": "minus", "sells": "minus"}
OWNERS = ("Mia", "Leo", "Zoe", "Max", "Ida", "Tom")
THINGS = ("coins", "apples", "books", "stamps", "cards", "shells")

POP_WORDINGS = {
    "director": ("Any idea who made {film}?", "Which person is behind {film}?"),
    "composer": ("Any idea whose music is in {film}?", "Which person did the tunes in {film}?"),
    "star": ("Any idea who plays in {film}?", "Which person is on the poster of {film}?"),
    "year": ("Any idea when {film} came out?", "How far back does {film} go?"),
}
GEN_WORDINGS = ("Write a short summary of {film}.", "Summarize {film}.", "What is {film} about?")


# The environment reads a question back into these classes (prompts.py).
@dataclass(frozen=True)
class Bridge:
    """Who is the `second` of the `first` of `film`?"""

    film: str
    first: str
    second: str


@dataclass(frozen=True)
class Compare:
    """Was `film` released before `other`?"""

    film: str
    other: str


@dataclass(frozen=True)
class Pop:
    """The `relation` of `film`, asked in casual words."""

    film: str
    relation: str


@dataclass(frozen=True)
class Problem:
    """`owner` has `start` `things`; then the `verbs` change the number by `amounts`."""

    owner: str
    things: str
    start: int
    verbs: tuple[str, str]
    amounts: tuple[int, int]

    @property
    def signs(self) -> list[str]:
        """For each verb, plus or minus."""
        return [SIGNS[verb] for verb in self.verbs]

    @property
    def steps(self) -> list[int]:
        """The change by each verb, with its sign."""
        moves = zip(self.signs, self.amounts, strict=True)
        return [amount if sign == "plus" else -amount for sign, amount in moves]


@dataclass(frozen=True)
class Gen:
    """What is `film` about?"""

    film: str


Slots = Bridge | Compare | Pop | Problem | Gen


def mini_questions(seed: int, split: str, part: str = "") -> list[Question]:
    """The questions of a split of the world of `seed`.

    `part` names another split, or the kind of questions to keep. Raises UsageError if it names neither.
    """
    check_part(part)
    if part in SPLITS:
        split = part
    made = make_questions(make_world(seed), split, SPLITS[split])
    questions = [question for _, question in made]
    if part in TRAINING_MIX:
        return [question for question in questions if question.dataset == part]
    return questions


def check_part(part: str, parts: Collection[str] = PARTS) -> None:
    """Raise UsageError for a part that is neither "" (all) nor one of `parts`."""
    if part and part not in parts:
        raise UsageError(f"mini:{part}: choose mini, or mini: and one of {', '.join(parts)}")


def make_questions(
    world: World, split: str, count: int, *, kinds: Sequence[str] | None = None
) -> list[tuple[Slots, Question]]:
    """Make `count` different questions in random order, with their slots.

    Their kinds have the shares of TRAINING_MIX in training, and equal shares elsewhere.
    """
    rng = random.Random(f"questions {split} {world.seed}")
    if not kinds:
        kinds = OOD_KINDS if split == "ood" else list(TRAINING_MIX)
    if split == "train":
        shares = [TRAINING_MIX[kind] for kind in kinds]
        kind_of_each = rng.choices(kinds, shares, k=count)
    else:
        kind_of_each = [kinds[number % len(kinds)] for number in range(count)]
        rng.shuffle(kind_of_each)
    texts: set[str] = set()
    return [_new_question(world, split, kind, rng, texts) for kind in kind_of_each]


def answer_of(slots: Slots, world: World) -> str:
    """The gold answer, computed from the facts of the world."""
    facts = world.facts
    match slots:
        case Bridge(film, first, second):
            return facts[facts[film, first], second]
        case Compare(film, other):
            return "yes" if facts[film, "year"] < facts[other, "year"] else "no"
        case Pop(film, relation):
            return facts[film, relation]
        case Problem(_, _, start):
            return str(start + sum(slots.steps))
        case Gen(film):
            return summary(facts[film, "genre"], facts[film, "hero"], facts[film, "director"])


def summary(genre: str, hero: str, director: str) -> str:
    """What a film is about, in the words of gold answers and replies."""
    return f"a {genre} about a {hero}, directed by {director}"


def put_into_words(slots: Slots, rng: random.Random) -> str:
    """The text of a question, in one of its wordings."""
    match slots:
        case Bridge(film, first, second):
            return f"{question_word(second)} is the {second} of the {first} of {film}?"
        case Compare(film, other):
            return f"Was {film} released before {other}?"
        case Pop(film, relation):
            return rng.choice(POP_WORDINGS[relation]).format(film=film)
        case Problem(owner, things, start, verbs, amounts):
            first = _change_in_words(verbs[0], amounts[0])
            second = _change_in_words(verbs[1], amounts[1])
            return (
                f"Problem: {owner} has {start} {things}, {first} and then {second}. "
                f"How many {things} does {owner} have now?"
            )
        case Gen(film):
            return rng.choice(GEN_WORDINGS).format(film=film)


def question_word(relation: str) -> str:
    """The first word of a question for a person, or for a birthplace."""
    return "What" if relation == "birthplace" else "Who"


def _change_in_words(verb: str, amount: int) -> str:
    """A step of a word problem: "finds 12 more" or "loses 7"."""
    return f"{verb} {amount} more" if SIGNS[verb] == "plus" else f"{verb} {amount}"


def _new_question(
    world: World, split: str, kind: str, rng: random.Random, texts: set[str]
) -> tuple[Slots, Question]:
    """Draw a question of this kind and split whose text is not in `texts`, and add its text there."""
    side = world.train if split == "train" else world.test
    for _ in range(2000):
        slots = draw_slots(kind, world, side.films, rng)
        text = put_into_words(slots, rng)
        is_of_split = split == "ood" or split == _split_of(slots, kind, world)
        if not is_of_split or text in texts:
            continue
        texts.add(text)
        question = Question(
            id=f"{kind}-{world.seed}-{_digest(text):016x}",
            dataset=kind,
            text=text,
            answers=(answer_of(slots, world),),
            kind=SCORED_AS.get(kind, "qa"),
        )
        return slots, question
    raise AssertionError(f"the world has only {len(texts)} {split} questions with this share of {kind}")


def draw_slots(kind: str, world: World, films: Sequence[str], rng: random.Random) -> Slots:
    """Draw the meaning of a question of this kind about `films`."""
    film = rng.choice(films)
    is_ood = kind in OOD_KINDS  # Then the pair is one of the pairs that no training question has.
    match kind:
        case "bridge" | "bridge_ood":
            relations = product(CREW, PERSON_RELATIONS)
            allowed = [pair for pair in relations if (pair in OOD_RELATIONS) == is_ood]
            first, second = rng.choice(allowed)
            return Bridge(film, first, second)
        case "compare":
            year = world.facts[film, "year"]
            others = [other for other in films if world.facts[other, "year"] != year]
            return Compare(film, rng.choice(others))
        case "pop":
            return Pop(film, rng.choice(list(POP_WORDINGS)))
        case "math" | "math_ood":
            two_verbs = product(SIGNS, SIGNS)
            verbs = rng.choice([pair for pair in two_verbs if (pair in OOD_VERBS) == is_ood])
            # With these numbers every total is between 2 and 97.
            amounts = (rng.randint(2, 19), rng.randint(2, 19))
            return Problem(rng.choice(OWNERS), rng.choice(THINGS), rng.randint(40, 59), verbs, amounts)
        case "gen":
            return Gen(film)
    raise AssertionError(f"there is no kind {kind!r}")


def _split_of(slots: Slots, kind: str, world: World) -> str:
    """The split of a question of any kind but OOD_KINDS. Its wording does not matter.

    A question about facts is held out of training if its film is for tests, and a word problem if the last
    two bits of its digest are 0. Of what is held out, the bit before them separates validation from test.
    """
    meaning = repr(slots)
    if isinstance(slots, Compare | Pop | Gen):
        # When the published figures were measured, these three classes had a field `kind`. The text still has
        # it, because another text would give other splits.
        meaning = f"{meaning[:-1]}, kind={kind!r})"
    digest = _digest(f"{world.seed} {meaning}")
    match slots:
        case Problem():
            is_for_training = digest % 4 != 0
        case _:
            is_for_training = slots.film not in world.test.films
    if is_for_training:
        return "train"
    return "validation" if digest // 4 % 2 == 1 else "test"


def _digest(text: str) -> int:
    """A 64-bit hash that, unlike Python's, is the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
