"""Prompt-R1 on one page: play, reward, advantages, loss, update. Run it: `python -m examples.minimal`.

A small language model, the *agent*, learns by reinforcement learning to question a large one, the
*environment* (arXiv 2511.01016). Here both are toys. The agent is a Qwen3 of half a million parameters that
knows the format of the game. The environment is a set of rules that answers one-step questions well. The
equations come in the paper's order. A test compares tokens, rewards, advantages, losses and weights with
those of `train.py`.

Shapes: B games, T tokens of the longest, V entries of the vocabulary.
"""

import argparse
import copy
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from statistics import mean, stdev

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from prompt_r1.f1 import exact_match, f1
from prompt_r1.miniworld.agent import mini_agent
from prompt_r1.miniworld.environment import MiniEnvironment
from prompt_r1.miniworld.questions import mini_questions
from prompt_r1.types import Question

# The algorithm. If the paper has another value, it stands in brackets.
QUESTIONS = 16  # in a step [128]
GROUP_SIZE = 5  # games of a question; they are compared with each other
MINI_BATCH = 40  # games in an optimiser step [64]
LEARNING_RATE, BETAS = 5e-4, (0.9, 0.98)  # for AdamW [1e-6, (0.9, 0.999)]
MAX_NORM = 1.0  # A gradient with a larger norm is scaled down to it.
CLIP, KL_COEF = 0.2, 0.001  # ε and β of eq. 17; eq. 12 has another ε and another β
# The game.
MAX_TURNS = 4  # [5]
MAX_NEW = 48  # tokens that the agent writes in a turn [1024]
MAX_TOKENS = 320  # tokens of the whole dialogue [8192]
INSTRUCTION = "Ask the assistant step by step, then answer."  # [Table 1]
# The reward has the coefficients of the paper's released code [0.25, 0.3, 0.4, 0.3, 1.5].
ALPHA, BETA, GAMMA, DELTA, EPSILON = 0.4, 0.25, 0.25, 0.1, 1.0
# The largest format reward of a game without an answer: 0.4. However many turns are good, the gate of eq. 15
# stays shut, and a perfect last turn adds its full β + γ + δ.
UNANSWERED = EPSILON - (BETA + GAMMA + DELTA)


# ------------------------------ the game (eqs 1-11) ------------------------------
def block(tag: str) -> re.Pattern[str]:
    """Match from an opening tag to the next closing tag, without another opening tag in between.

    In `<a> x <a> y </a>`, the content is y.
    """
    return re.compile(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", re.DOTALL)


THINK, PROMPT, ANSWER = block("think"), block("interaction_prompt"), block("answer")
TAG = "</?(?:think|interaction_prompt|interaction_response|answer)>"
PERFECT_END = re.compile(rf"\s*<think>((?!{TAG}).)*</think>\s*<answer>((?!{TAG}).)*</answer>\s*", re.DOTALL)


@dataclass
class Turn:
    """What the agent wrote, and what the environment replied."""

    text: str
    think: str | None = None
    prompt: str | None = None  # goes to the environment
    answer: str | None = None  # ends the game
    reply: str | None = None  # None: the environment was not asked


def read_turn(text: str) -> Turn:
    """Read the think block, and then the prompt or answer block that is complete first."""
    turn, think = Turn(text), THINK.search(text)
    turn.think = think[1].strip() if think else None
    start = think.end() if think else 0
    prompt, answer = PROMPT.search(text, start), ANSWER.search(text, start)
    if prompt and (not answer or prompt.end() < answer.end()):
        turn.prompt = prompt[1].strip()
    elif answer:
        turn.answer = answer[1].strip()
    return turn


@dataclass
class Game:
    """A dialogue about one question. Tokens are only appended: we train on exactly what was sampled."""

    question: Question
    seed: str = ""
    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # True: the agent's own token, which has a loss
    turns: list[Turn] = field(default_factory=list)
    over: bool = False

    def add(self, tokens: list[int], *, sampled: bool) -> None:
        self.tokens += tokens
        self.sampled += [sampled] * len(tokens)


def encode(tokenizer, *texts: str) -> list[int]:
    """Encode each text by itself. A text may contain control tokens here; `protocol.Codec` prevents this."""
    return [token for text in texts for token in tokenizer(text, add_special_tokens=False).input_ids]


def play(games: list[Game], model, tokenizer, environment: MiniEnvironment, *, greedy: bool = False) -> None:
    """Play all games, turn by turn. The environment sees the agent's prompts, but not the question."""
    end = tokenizer.eos_token_id  # The eos token of this tokenizer is <|im_end|>.
    # The end of the user's message and the beginning of the agent's.
    agents_turn = "<|im_end|>\n<|im_start|>assistant\n"
    for game in games:
        asked = [f" {game.question.text}", f"\n{INSTRUCTION}{agents_turn}"]
        game.add(encode(tokenizer, "<|im_start|>user\nQuestion:", *asked), sampled=False)
    for turn_number in range(1, MAX_TURNS + 1):
        playing = [game for game in games if not game.over]
        for game, tokens in zip(playing, sample(model, playing, turn_number, end, greedy), strict=True):
            game.add(tokens, sampled=True)
            turn = read_turn(tokenizer.decode([token for token in tokens if token != end]))
            game.turns.append(turn)
            # After the last turn the environment is not asked, because the agent could not read its reply.
            if not turn.prompt or turn_number == MAX_TURNS:
                game.over = True
                continue
            turn.reply = environment.reply(turn.prompt).text
            close = "" if tokens[-1] == end else "<|im_end|>"  # ends a message that was cut off
            before = f"{close}\n<|im_start|>user\n<interaction_response>"
            message = encode(tokenizer, before, turn.reply, f"</interaction_response>{agents_turn}")
            # If the reply does not fit, the game is over, but its turns still earn their reward.
            game.over = len(game.tokens) + len(message) >= MAX_TOKENS
            if not game.over:
                game.add(message, sampled=False)


@torch.no_grad()
def sample(model, games: list[Game], turn_number: int, end: int, greedy: bool) -> list[list[int]]:
    """Sample the next turn of each game, token by token. Keys and values of earlier tokens are cached.

    The dialogues are padded at the left, so that the last column always predicts the next token. Each game
    has its own random numbers, so what it samples does not depend on the games beside it.
    """
    longest = max((len(game.tokens) for game in games), default=0)
    padding = [longest - len(game.tokens) for game in games]
    tokens = torch.tensor([[0] * n + game.tokens for n, game in zip(padding, games, strict=True)])  # (B, T)
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])  # 0 for the padding
    positions = torch.arange(longest) - torch.tensor(padding)[:, None]
    room = [min(MAX_NEW, MAX_TOKENS - len(game.tokens)) for game in games]
    generators = [random.Random(f"{game.seed}/{turn_number}") for game in games]
    cache, written, writing = DynamicCache(), [[] for _ in games], [True] * len(games)
    while any(writing):
        # The cache is passed by position, because transformers 5.24 renamed its parameter.
        logits = model(tokens, mask, positions.clamp(min=0), cache, logits_to_keep=1).logits[:, -1]  # (B, V)
        if greedy:
            new = logits.argmax(-1)
        else:  # Sample: the first token whose cumulative weight exceeds a random share of the whole sum.
            cumulative = (logits - logits.amax(-1, keepdim=True)).exp().cumsum(-1)
            uniform = torch.tensor([[generator.random()] for generator in generators])
            # If rounding makes the share equal to the whole sum, a search in all V entries would give V, and
            # no token has this number. A search in the first V - 1 entries gives V - 1, the last token.
            below = cumulative[:, :-1].contiguous()
            new = torch.searchsorted(below, uniform * cumulative[:, -1:], right=True)[:, 0]
        for row, token in enumerate(new.tolist()):
            if writing[row]:
                written[row].append(token)
                writing[row] = token != end and len(written[row]) < room[row]
        # (B, 1). For turns that have ended, the model goes on, but nothing is written.
        tokens, positions = new[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)
    return written


# ------------------------------ the reward (eqs 12-15) ------------------------------
@dataclass(frozen=True)
class Reward:
    # The four terms of eq. 12: good turns, an answer, a non-empty answer, a complete last turn.
    terms: tuple[float, float, float, float]
    format: float  # R_fmt
    answer: float  # R_ans
    total: float  # R


def score(game: Game) -> Reward:
    """Score the format, and then the answer. The answer counts only if the format has earned ε."""
    last, answer = game.turns[-1], game.turns[-1].answer
    # Eq. 12: R_fmt = min(ε, α Σ M_t + β A_p + γ A_n + δ C_f)
    asked = [turn for turn in game.turns if turn.reply is not None]  # not the last turn
    good_turns = sum(bool(turn.think and turn.prompt) for turn in asked)  # Σ M_t
    parsed, filled = answer is not None, bool(answer)  # A_p, A_n
    complete = bool(parsed and last.think and PERFECT_END.fullmatch(last.text))  # C_f
    terms = (ALPHA * good_turns, BETA * parsed, GAMMA * filled, DELTA * complete)
    format_reward = min(EPSILON if parsed else UNANSWERED, sum(terms))  # UNANSWERED is not the paper's
    # Eqs 13, 14: R_ans = max over the gold answers of F1(answer, gold)
    answer_reward = f1(answer, game.question.answers) if answer is not None else 0.0
    # Eq. 15: R = -ε + R_fmt + R_ans if R_fmt = ε, which opens the gate; else -ε + R_fmt
    gate_is_open = format_reward >= EPSILON - 1e-9  # a sum of floats may miss ε by a rounding error
    total = -EPSILON + format_reward + (answer_reward if gate_is_open else 0.0)
    return Reward(terms, format_reward, answer_reward, total)


# ------------------------------ GRPO (eqs 16-17) ------------------------------
def group_advantages(rewards: list[float]) -> list[float]:
    """Eq. 16: Â_i = (R_i - mean(R)) / (std(R) + 1e-6) over the games of a question; 0 if all did equally."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    centre, spread = mean(rewards), stdev(rewards)
    return [(reward - centre) / (spread + 1e-6) for reward in rewards]


def token_logprobs(model, games: list[Game]) -> tuple[Tensor, Tensor]:
    """log π of each token after the first, and whether the agent sampled it; both (B, T-1)."""
    longest = max(len(game.tokens) for game in games)
    # Right padding and a causal model: real tokens cannot see the padding, so no mask is needed.
    tokens = torch.tensor([game.tokens + [0] * (longest - len(game.tokens)) for game in games])  # (B, T)
    sampled = torch.tensor([game.sampled + [False] * (longest - len(game.tokens)) for game in games])
    logits = model(tokens).logits[:, :-1]  # column t predicts token t + 1
    logprobs = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[:, :, 0]
    return logprobs, sampled[:, 1:]


@dataclass(frozen=True)
class Loss:
    """Eq. 17 and its parts. All parts except `total` are (B, T-1)."""

    ratio: Tensor  # r = π_θ / π_old
    surrogate: Tensor  # min(r Â, clip(r, 1 - CLIP, 1 + CLIP) Â)
    kl: Tensor  # π_ref / π_θ - log(π_ref / π_θ) - 1, never negative
    weights: Tensor  # the weight of each token in `total`
    total: Tensor  # Σ weights (-surrogate + KL_COEF kl), the only part with a gradient


def grpo_loss(logprobs: Tensor, old: Tensor, ref: Tensor, sampled: Tensor, advantages: Tensor) -> Loss:
    """Eq. 17 in the paper's later version: the mean over games of the mean over each game's own tokens.

    `logprobs`, `old` and `ref` are (B, T-1): the log-probabilities by the policy that learns, the policy that
    played, and the frozen reference. `advantages` is (B, 1): all tokens of a game share its advantage.
    """
    ratio = (logprobs - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    log_ratio = ref - logprobs
    kl = log_ratio.exp() - log_ratio - 1
    weights = sampled / sampled.sum(1, keepdim=True) / len(sampled)  # 0 for what the agent did not write
    total = (weights * (-surrogate + KL_COEF * kl)).sum()
    return Loss(ratio.detach(), surrogate.detach(), kl.detach(), weights, total)


# ------------------------------ training ------------------------------
@dataclass(frozen=True)
class Step:
    games: list[Game]  # the groups one after the other
    rewards: list[Reward]
    advantages: list[float]
    losses: list[Loss]  # one for each mini-batch


class Training:
    """Agent, frozen reference, environment and questions. `seed` has the meaning of `train.py --seed`."""

    def __init__(self, seed: int) -> None:
        folder = mini_agent(seed, "runs/cache")  # a warm-started agent; for seed 0 it is in the package
        self.seed, self.questions = seed, mini_questions(seed, "train")
        self.environment = MiniEnvironment(seed=seed)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.reference = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, BETAS, weight_decay=0.0)
        self.upcoming = self.shuffled_epochs()

    def shuffled_epochs(self) -> Iterator[Question]:
        for epoch in count():
            questions = list(self.questions)
            random.Random(f"questions {self.seed} {epoch}").shuffle(questions)
            yield from questions

    def step(self, step_number: int) -> Step:
        """Play a group of games of each question, score and compare them, and learn."""
        games = [
            Game(question, f"{self.seed}/{step_number}/{question_number}/{sample_number}")
            for question_number, question in enumerate(islice(self.upcoming, QUESTIONS))
            for sample_number in range(GROUP_SIZE)
        ]
        play(games, self.model, self.tokenizer, self.environment)
        rewards = [score(game) for game in games]
        advantages = []
        for start in range(0, len(games), GROUP_SIZE):
            advantages += group_advantages([reward.total for reward in rewards[start : start + GROUP_SIZE]])
        batches = [slice(start, start + MINI_BATCH) for start in range(0, len(games), MINI_BATCH)]
        with torch.no_grad():  # π_old is computed before `learn` changes the weights.
            old_logprobs = [token_logprobs(self.model, games[batch])[0] for batch in batches]
        losses = [
            self.learn(games[batch], torch.tensor(advantages[batch]), old)
            for batch, old in zip(batches, old_logprobs, strict=True)
        ]
        return Step(games, rewards, advantages, losses)

    def learn(self, games: list[Game], advantages: Tensor, old: Tensor) -> Loss:
        """One optimiser step on a mini-batch."""
        with torch.no_grad():
            ref, _ = token_logprobs(self.reference, games)
        logprobs, sampled = token_logprobs(self.model, games)
        loss = grpo_loss(logprobs, old, ref, sampled, advantages[:, None])
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def validation_em(self) -> float:
        """The share of 100 held-out questions that greedy games answer exactly."""
        games = [Game(question) for question in mini_questions(self.seed, "validation")[:100]]
        play(games, self.model, self.tokenizer, self.environment, greedy=True)
        return mean(exact_match(game.turns[-1].answer or "", game.question.answers) for game in games)


def show(step: Step, tokenizer) -> None:
    """Print a game with its reward, its group's advantages, and the loss of its first turn."""
    # Choose a game of the second mini-batch: in the first, no weight has moved yet, and all ratios are 1. If
    # there is a word problem, choose it, because its answer is not right by luck.
    second_batch = range(MINI_BATCH, len(step.games))
    problems = [place for place in second_batch if step.games[place].question.kind == "math"]
    chosen = max(problems or second_batch, key=lambda place: step.advantages[place])
    game, reward, loss = step.games[chosen], step.rewards[chosen], step.losses[1]
    print(f"\nQuestion: {game.question.text}  (gold: {' or '.join(game.question.answers)})")
    for turn in game.turns:
        print(f"\n  agent        {turn.text}" + (f"\n  environment  {turn.reply}" if turn.reply else "\n"))
    terms = " + ".join(f"{term:.2f}" for term in reward.terms)
    print(f"Eq. 12: R_fmt = min({EPSILON:.2f}, {terms}) = {reward.format:.2f}")
    print(f"Eqs 13-15: R_ans = F1 = {reward.answer:.2f}, R = {reward.total:.2f}")
    start = chosen - chosen % GROUP_SIZE
    for place, other in enumerate(step.rewards[start : start + GROUP_SIZE], start):
        mark = "  <- this game" if place == chosen else ""
        print(f"Eq. 16: R = {other.total:5.2f}, advantage = {step.advantages[place]:6.3f}{mark}")
    print("Eq. 17:        token     ratio  surrogate        KL    weight, of the first turn")
    # The first turn ends before the next token that was not sampled, or at the end of the game.
    first = end = game.sampled.index(True)
    while end < len(game.tokens) and game.sampled[end]:
        end += 1
    for place in range(first, end):
        # The row of the game in the second mini-batch. Column t of the loss belongs to token t + 1.
        at = (chosen - MINI_BATCH, place - 1)
        numbers = [part[at].item() for part in (loss.ratio, loss.surrogate, loss.kl, loss.weights)]
        token = repr(tokenizer.decode([game.tokens[place]]))
        print("{:>22} {:7.4f} {:10.4f} {:9.1e} {:9.5f}".format(token, *numbers))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=0, help="seed of world, agent and sampling (0)")
    parser.add_argument("--steps", type=int, default=30, help="training steps (30)")
    settings = parser.parse_args(arguments)
    if settings.seed < 0 or settings.steps < 1:
        parser.error("--seed must be at least 0, and --steps at least 1")
    torch.set_num_threads(1)  # A model this small is slower with more threads.
    transformers.logging.disable_progress_bar()  # Loading the weights takes no time.
    print(f"{settings.steps} steps take about {3 * settings.steps} s on one core.", flush=True)
    training, begin = Training(settings.seed), time.perf_counter()
    print(f"step  0: validation EM {training.validation_em():.2f}", flush=True)
    for number in range(1, settings.steps + 1):
        step = training.step(number)
        if number == 1:
            show(step, training.tokenizer)
        reward = mean(reward.total for reward in step.rewards)
        loss = mean(loss.total.item() for loss in step.losses)
        kl = mean((loss.weights * loss.kl).sum().item() for loss in step.losses)
        line = f"step {number:2}: reward {reward:6.3f}, loss {loss:7.4f}, KL {kl:.4f}"
        if number % 5 == 0 or number == settings.steps:
            line += f", validation EM {training.validation_em():.2f}"
        print(f"{line}  ({time.perf_counter() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
