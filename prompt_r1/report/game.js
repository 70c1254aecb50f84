// Draws the games of one question side by side: reward, advantage, dialogue with the trained tokens, cost.

const TERMS = ["interactions", "parsed", "filled", "complete"]; // of the format, eq. 12

const rewardsOf = (group) => group.games.filter((game) => game.reward).map((game) => game.reward.total);
const judged = (games) => games.filter((game) => game.right !== null && game.stop !== "env_error");
const rightOf = (games) => judged(games).filter((game) => game.right).length;
const runKey = (index) => element("i", { class: `line-key run-${LETTERS[index]}` });

function drawEntry(entry, runs, needle) {
  const first = entry.groups.find(Boolean);
  const gold = appendText(element("span", { class: "gold" }), first.answers.map((one) => plain(one)).join("  ·  ") || "none");
  const about = element("div", { class: "about-group" }, element("span", { class: "chip" }, plain(first.dataset)),
    element("span", { class: "muted" }, placeOf(entry)), element("span", { class: "muted" }, term("gold", "gold answer")), gold);
  const opening = element("details", { class: "opening" }, element("summary", {}, term("opening", "Opening"), first.opening.tokens ? ` · ${first.opening.tokens} tokens` : ""));
  opening.append(drawSpan(first.opening, "", needle));
  const parts = [appendText(element("h3", { class: "question" }), first.question, needle), about, opening];
  entry.groups.forEach((group, index) => {
    if (!group) return;
    const run = runs.length > 1 ? [runKey(index), element("b", {}, plain(runs[index].name))] : [];
    const writer = group.kind === "evaluation" ? "as recorded" : "environment";
    const games = group.games.map((game, place) => drawGame(game, `Game ${place + 1}`, runs[index], writer, needle));
    parts.push(element("p", { class: "group-of muted" }, ...run, element("span", {}, ...spreadOf(group))), element("div", { class: "players" }, ...games));
  });
  return parts;
}

/** How many games of a group are right, and how different their rewards are. */
function spreadOf(group) {
  const games = judged(group.games);
  const right = games.length ? `${rightOf(games)} of ${games.length} right` : "";
  if (group.kind !== "training") return [right];
  const rewards = rewardsOf(group);
  if (!rewards.length) return ["no game was trained on, because calls of the environment failed"];
  const centre = mean(rewards);
  const spread = Math.sqrt(sum(rewards.map((value) => (value - centre) ** 2)) / Math.max(1, rewards.length - 1));
  return [right && `${right} · `, term("reward"), " of the ", term("group"), `: mean ${fixed(centre)}, standard deviation ${fixed(spread)}`];
}

function drawGame(game, name, { epsilon, settings }, writer, needle) {
  const total = game.reward ? [element("small", {}, term("reward"), " "), fixed(game.reward.total)] : game.player ? [] : [element("small", {}, "no reward")];
  const card = element("section", { class: "game", "aria-label": name },
    element("header", {}, element("h3", {}, plain(game.player) || name), element("span", { class: "total" }, ...total)), element("p", { class: "outcome" }, ...outcome(game)));
  if (game.advantage !== null) card.append(element("p", { class: "sum" }, term("advantage"), ` ${signed(game.advantage)}`));
  if (game.reward) card.append(...rewardParts(game.reward, epsilon, settings));
  if (game.answer !== null) card.append(appendText(element("p", { class: "answer" }, element("span", { class: "muted" }, "answer  ")), game.answer, needle));
  if (game.error) card.append(appendText(element("p", { class: "answer shut" }), game.error));
  card.append(...game.spans.map((span) => drawSpan(span, span.written ? "agent" : writer, needle)));
  const written = sum(game.spans.filter((span) => span.written).map((span) => span.tokens));
  const bill = [counted(game.calls, "call"), game.seconds && seconds(game.seconds), game.usd ? dollars(game.usd) : "no cost", written && `${written} tokens written`];
  card.append(element("p", { class: "bill" }, bill.filter(Boolean).join(" · ")));
  return card;
}

/** How the game ended, in words. ✓ or ✗: the answer equals the gold answer or not; none for long texts and failed calls. */
function outcome(game) {
  const ended = END_NAMES[game.stop] ?? plain(game.stop);
  if (!judged([game]).length) return [ended];
  const word = game.right ? "✓ right" : game.answer === null ? "✗ no answer" : "✗ wrong";
  return [element("b", { class: game.right ? "right" : "wrong", title: WORDS.right }, word), game.stop === "answered" ? "" : ` · ${ended}`];
}

/** The terms of eq. 12, and eq. 15 in numbers. The settings name the user's functions in place of F1 and eq. 15, if there are any. */
function rewardParts(reward, epsilon, { answer_metric: metric, reward: own }) {
  const isOpen = reward.gate_is_open ?? (epsilon !== null && reward.format >= epsilon - 1e-9);
  const gate = element("span", { class: isOpen ? "open" : "shut" }, term("gate", isOpen ? "gate open" : "gate shut"));
  const parts = [element("p", { class: "sum" }, term("format"), ` ${fixed(reward.format)}${epsilon === null ? "" : ` of ${fixed(epsilon)}`} · `, gate, " · ", metric ? plain(metric) : term("F1"), ` ${fixed(reward.answer)}`)];
  const terms = TERMS.filter((name) => reward.terms?.[name]);
  if (terms.length) parts.unshift(element("p", { class: "terms" }, ...terms.map((name) => element("span", {}, term(name), ` ${fixed(reward.terms[name])}`))));
  const formula = own || `−${fixed(epsilon ?? 0)} + ${fixed(reward.format)}${isOpen ? ` + ${fixed(reward.answer)}` : ""}`;
  if (own || epsilon !== null) parts.push(element("p", { class: "sum muted" }, `reward = ${formula} = ${fixed(reward.total)}`));
  return parts;
}

/** A span of tokens; the written ones are tinted. */
function drawSpan(span, who, needle) {
  const words = element("div", { class: "words" });
  const node = element("div", { class: `span ${span.written ? `wrote ${span.advantage === null ? "untrained" : ""}` : "read"}` });
  if (who) {
    const facts = [span.tokens && counted(span.tokens, "token"), span.seconds && seconds(span.seconds)];
    node.append(element("div", { class: "who" }, element("span", {}, who), element("span", {}, facts.filter(Boolean).join(" · "))));
  }
  if (span.written) words.append(...tokensOf(span).map((token) => drawToken(token, needle)));
  else appendText(words, span.text, needle, true);
  node.append(words);
  return node;
}
