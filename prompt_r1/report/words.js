// The words of the page in plain English, shown when a word is pointed at.

const WORDS = {
  group: "All games of one question in one step. Each is compared with the others.",
  opening: "What the agent reads first: the instruction and the question.",
  gold: "The right answer, or several that are all accepted.",
  right: "✓: the answer equals the gold answer (in mathematics also as a number). ✗: it does not, or there is none. Long texts have no mark, only F1.",
  EM: "Exact match: the share of answers that equal a gold answer, apart from case, articles and punctuation.",
  F1: "Overlap of the words of the answer with those of the gold answer, from 0 to 1.",
  reward: "What a game earns: it starts at minus the needed format, adds the format, and adds F1 if the gate is open (eq. 15).",
  format: "Points for the form of a game, up to a limit (eq. 12): its interactions, and whether the answer can be parsed, is not empty, and ends a complete turn.",
  interactions: "Points for the questions to the environment, α Σ M_t in eq. 12.",
  parsed: "Points for an answer that can be parsed, β A_p in eq. 12.",
  filled: "Points for an answer that is not empty, γ A_n in eq. 12.",
  complete: "Points for a complete last turn, δ C_f in eq. 12.",
  gate: "Open if the game has all points of the format, ε in eq. 12. Only then does the answer count.",
  "well-formed": "Every turn is one think block and one action, and the last action is an answer.",
  advantage: "How much better a game is than the others of its group, in standard deviations (eq. 16). Tokens of better games become likelier, those of worse ones less likely.",
  "log-probability": "Logarithm of the probability with which the agent sampled a token, in nats: 0 is certain.",
  ratio: "The probability of a token in the policy just before the optimiser step of its game, divided by that with which it was sampled. In the first mini-batch of a step it is 1. Eq. 17 clips it.",
  spread: "Differences between the rewards of a group. Without any, no game is better than another, and nothing is learned from the group.",
  "log-probability gap": "Largest difference between the log-probability of a token as it was sampled and as it is trained on. In float32 it stays below 0.0001 nats; more means that engine and trainer disagree.",
  KL: "Distance of the agent from its start, in nats per token: the estimate k3 of eq. 17.",
  entropy: "How undecided the agent is, in nats per token. Near 0, all games of a group are the same.",
  "gradient norm": "Length of the gradient of a step, before it is clipped.",
  journal: "The record of all calls. A call that is in it is not sent again.",
  token: "A piece of text as the model reads it: a word or a part of one.",
};

/** A word with its explanation as a tooltip. */
const term = (word, label = word) => element("abbr", { title: WORDS[word] }, label);
