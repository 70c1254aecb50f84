// Draws the games of one question side by side: reward, advantage, dialogue with the trained tokens, cost.

const TERMS = ["interactions", "parsed", "filled", "complete"]; // of the format, eq. 12
// Marks of a chat template: special tokens, with the role that follows them.
const MARK = "(?:<\\|[\\w:]{1,40}\\|>|<(?:start|end)_of_turn>|<(?:bos|eos|\\/?s)>|\\[\\/?INST\\])(?:(?:system|user|assistant|model)(?=\\s|<|$))?\\s*";
const MARKS_FIRST = new RegExp(`^\\s*(?:${MARK})+`);
const MARKS_LAST = new RegExp(`\\s*(?:${MARK})+$`);
const TOKENS_AT_ONCE = 3000; // a longer span is drawn as one text, without single tokens

/** How the tokens of a game took part in the update. */
function training(game) {
  if (game.advantage === null) return "untrained";
  return game.advantage > 0 ? "better" : game.advantage < 0 ? "worse" : "flat";
}

function drawEntry(entry, runs, view) {
  const first = entry.groups.find(Boolean);
  const about = element("div", { class: "about-group" },
    element("span", { class: "chip" }, plain(first.dataset)), element("span", { class: "muted" }, placeOf(entry)), element("span", { class: "muted" }, term("gold", "gold answer")));
  about.append(appendText(element("span", { class: "gold" }), first.answers.map((gold) => plain(gold)).join("  ·  ") || "none"));
  const opening = element("details", { class: "opening" }, element("summary", {}, term("opening", "Opening"), `${first.opening.tokens ? ` · ${first.opening.tokens} tokens` : ""}`));
  opening.append(drawSpan(first.opening, {}, "", view));
  opening.open = view.opening;
  const parts = [appendText(element("h3", { class: "question" }), first.question.slice(0, LONG), view.needle), about, opening];
  if (first.kind !== "evaluation") parts.push(maskLegend(first.kind === "training"));
  entry.groups.forEach((group, index) => {
    if (!group) return;
    if (runs.length > 1) parts.push(element("p", { class: "group-of key" }, runKey(index), element("b", {}, plain(runs[index].name)), element("span", {}, ...spreadOf(group))));
    else parts.push(element("p", { class: "group-of muted" }, element("span", {}, ...spreadOf(group))));
    const cards = group.games.map((game, place) => drawGame(game, place, runs[index].epsilon, { ...view, settings: runs[index].settings, link: linkOf(entry, index, place) }));
    parts.push(...withMore(element("div", { class: "players", role: "group", "aria-label": `Games of ${runs[index].name}` }, ...cards)));
  });
  return parts;
}

const runKey = (index) => element("i", { class: `line-key ${runStyle(index)}` });

function spreadOf(group) {
  const rewards = group.games.filter((game) => game.reward).map((game) => game.reward.total);
  const judged = group.games.filter((game) => game.right !== null && game.stop !== "env_error");
  const right = judged.length ? `${judged.filter((game) => game.right).length} of ${judged.length} right` : "";
  if (group.kind === "evaluation") return [right];
  if (!rewards.length) return ["no game was trained on, because calls of the environment failed"];
  if (group.kind !== "training") return [right];
  const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
  const spread = Math.sqrt(rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(1, rewards.length - 1));
  return [right ? `${right} · ` : "", term("reward"), ` of the `, term("group"), `: mean ${fixed(mean)}, standard deviation ${fixed(spread)}`];
}

function maskLegend(trained) {
  const kinds = [["better", "made likelier: better than the group"], ["worse", "made less likely: worse"], ["flat", "all games equal"]];
  const entries = [...(trained ? kinds : []), ["untrained", trained ? "written, not trained" : "written"], ["read", "read"]];
  const box = element("input", { type: "checkbox" });
  box.checked = $("detail").classList.contains("framed");
  box.addEventListener("change", toggleFrames);
  return element("div", { class: "legend mask-legend", "aria-label": "Colours of the tokens" },
    ...entries.map(([kind, label]) => element("span", { class: "key" }, element("i", { class: `swatch ${kind}` }), label)),
    element("label", { class: "key frames" }, box, "chat-template tokens"));
}

function drawGame(game, place, epsilon, view) {
  const kind = training(game);
  const total = element("span", { class: "total" }, ...(game.reward ? [element("small", {}, term("reward"), " "), fixed(game.reward.total)] : game.total ? [] : [element("small", {}, "no reward")]));
  const name = game.player ? plain(game.player) : `Game ${place + 1}`;
  const link = element("a", { class: "link", href: view.link, title: "Link to this game", "aria-label": `Link to game ${place + 1}` }, "#");
  const card = element("section", { class: `game${view.matches(game) ? "" : " dim"}`, tabindex: "-1", "aria-label": `Game ${place + 1}` },
    element("header", {}, element("h3", {}, name, " ", link), total), element("p", { class: "outcome" }, ...outcome(game)));
  if (game.advantage !== null) card.append(meter(game.advantage));
  if (game.reward) card.append(...rewardParts(game.reward, epsilon, view.settings));
  if (game.answer !== null) card.append(appendText(element("p", { class: "answer" }, element("span", { class: "muted" }, "answer  ")), game.answer.slice(0, LONG), view.needle));
  if (game.error) card.append(appendText(element("p", { class: "answer shut" }), game.error.slice(0, LONG)));
  let turn = 0;
  for (const span of game.spans) {
    const call = span.lengths === undefined ? game.calls[turn++] : undefined;
    const who = span.dialogue ? "as recorded" : span.lengths === undefined ? "environment" : "agent";
    card.append(drawSpan(span, { kind, advantage: game.advantage, call }, who, view));
  }
  card.append(costLine(game));
  return card;
}

/** ✓ or ✗ for an answer that equals the gold answer or not; nothing for long texts and failed calls. */
function mark(game) {
  if (game.right === null || game.stop === "env_error") return "";
  return element("span", { class: `mark ${game.right ? "right" : "wrong"}`, title: WORDS.right, role: "img", "aria-label": game.right ? "right" : "wrong" }, game.right ? "✓ " : "✗ ");
}

/** How the game ended, in words. */
function outcome(game) {
  const ended = END_NAMES[game.stop] ?? plain(game.stop);
  if (game.stop === "env_error" || game.right === null) return [ended];
  const judged = element("b", { class: game.right ? "right" : "wrong" }, mark(game), game.right ? "right" : game.answer === null ? "no answer" : "wrong");
  return game.stop === "answered" ? [judged] : [judged, ` · ${ended}`];
}

/** The cards of the games, under a line that says which ones are visible if not all are. */
function withMore(players) {
  const text = element("span");
  const button = (label, move) => {
    const node = element("button", { type: "button", title: move > 0 ? "More games to the right (l)" : "Games to the left (h)" }, label);
    node.addEventListener("click", () => players.scrollBy({ left: move * players.clientWidth * 0.8, behavior: "smooth" }));
    return node;
  };
  const [left, right] = [button("←", -1), button("→", 1)];
  const bar = element("p", { class: "more-games", role: "status" }, left, text, right);
  const update = () => {
    const cards = [...players.children];
    const edge = players.getBoundingClientRect();
    const inside = cards.map((card) => card.getBoundingClientRect()).map((box) => box.left >= edge.left - 8 && box.right <= edge.right + 8);
    const [first, last] = [inside.indexOf(true), inside.lastIndexOf(true)];
    bar.hidden = players.scrollWidth <= players.clientWidth + 2;
    const shown = first === last ? `game ${first + 1}` : `games ${first + 1} to ${last + 1}`;
    text.textContent = first < 0 ? `${cards.length} games` : `${shown} of ${cards.length}`;
    left.disabled = players.scrollLeft < 4;
    right.disabled = players.scrollLeft + players.clientWidth > players.scrollWidth - 4;
    players.classList.toggle("more-right", !bar.hidden && !right.disabled);
  };
  players.addEventListener("scroll", update, { passive: true });
  new ResizeObserver(update).observe(players);
  return [bar, players];
}

/** The advantage as a bar from the middle: to the left if worse than the mean of the group. */
function meter(advantage) {
  const reach = Math.min(1, Math.abs(advantage) / 2) * 130;
  return shape("svg", { class: "meter", viewBox: "0 0 300 26", role: "img", "aria-label": `advantage ${signed(advantage)}` },
    shape("line", { class: "axis", x1: 20, x2: 280, y1: 7, y2: 7 }), shape("line", { class: "axis", x1: 150, x2: 150, y1: 1, y2: 13 }),
    shape("rect", { class: advantage < 0 ? "worse" : "better", x: advantage < 0 ? 150 - reach : 150, y: 3, width: reach, height: 8, rx: 1.5 }),
    shape("text", { x: 150, y: 24, "text-anchor": "middle" }, `advantage ${signed(advantage)}`));
}

/** Eq. 12 as a bar with the cap ε, and eq. 15 in numbers. The settings name the user's functions in place of F1 and eq. 15, if there are any. */
function rewardParts(reward, epsilon, { answer_metric: metric, reward: own }) {
  const shut = element("span", { class: "shut" }, term("gate", "gate shut"));
  const open = element("span", { class: "open" }, term("gate", "gate open"));
  const isOpen = reward.gate_is_open ?? (epsilon !== null && reward.format >= epsilon - 1e-9);
  const sum = element("p", { class: "sum" }, term("format"), ` ${fixed(reward.format)}${epsilon === null ? "" : ` of ${fixed(epsilon)}`} · `, isOpen ? open : shut, " · ", metric ? plain(metric) : term("F1"), ` ${fixed(reward.answer)}`);
  const formula = own ? [element("p", { class: "sum muted" }, `reward = ${own} = ${fixed(reward.total)}`)] : epsilon === null ? [] : [element("p", { class: "sum muted" },
    `reward = −${fixed(epsilon)} + ${fixed(reward.format)}${isOpen ? ` + ${fixed(reward.answer)}` : ""} = ${fixed(reward.total)}`)];
  return [...(reward.terms ? [termsBar(reward, epsilon ?? 1), termsKey(reward)] : []), sum, ...formula];
}

function termsBar(reward, epsilon) {
  const total = Object.values(reward.terms).reduce((sum, value) => sum + value, 0);
  const unit = 298 / Math.max(epsilon, total);
  const label = TERMS.map((name) => `${name} ${fixed(reward.terms[name])}`).join(", ");
  const svg = shape("svg", { class: "parts", viewBox: "0 0 300 22", role: "img", "aria-label": label }, shape("title", {}, label),
    shape("rect", { class: "frame", x: 1, y: 1, width: 298, height: 16 }));
  let at = 1;
  TERMS.forEach((name, order) => {
    const width = reward.terms[name] * unit;
    if (!width) return;
    svg.append(shape("rect", { class: `p${order}`, x: at, y: 1, width, height: 16 }));
    at += width;
  });
  if (total > epsilon) svg.append(shape("line", { class: "cap", x1: 1 + epsilon * unit, x2: 1 + epsilon * unit, y1: 0, y2: 21 }));
  return svg;
}

/** The terms of the format in words, with the colours of the bar. */
function termsKey(reward) {
  const keys = TERMS.map((name, order) => ({ name, order })).filter(({ name }) => reward.terms[name]).map(({ name, order }) =>
    element("span", { class: "key" }, element("i", { class: `swatch p${order}` }), term(name), ` ${fixed(reward.terms[name])}`));
  return element("p", { class: "terms" }, ...keys);
}

/** A span of tokens. Written tokens have the colour of the advantage and their probability as a tooltip. */
function drawSpan(span, { kind = "", advantage = 0, call }, who, view) {
  const wrote = span.lengths !== undefined;
  const words = element("div", { class: "words" });
  const node = element("div", { class: `span ${wrote ? `wrote ${kind}` : "read"}` });
  if (who) {
    const facts = [span.tokens ? `${span.tokens} token${span.tokens === 1 ? "" : "s"}` : "", call?.latency !== undefined ? seconds(call.latency) : "", call?.usd ? dollars(call.usd) : ""];
    node.append(element("div", { class: "who" }, element("span", {}, who), element("span", {}, facts.filter(Boolean).join(" · "))));
  }
  if (wrote && advantage) words.style.setProperty("--alpha", (0.1 + 0.2 * Math.min(1, Math.abs(advantage) / 2)).toFixed(2));
  if (wrote && span.lengths && span.lengths.length <= TOKENS_AT_ONCE) drawTokens(words, span, view);
  else if (wrote) drawMarked(words, span.text, view.needle);
  else drawRead(words, span.text, view.needle);
  node.append(words);
  return node;
}

function drawTokens(words, span, view) {
  let at = 0;
  [...span.lengths].forEach((digit, place) => {
    const text = span.text.slice(at, at += parseInt(digit, 36));
    const chance = span.chances ? Number(span.chances.slice(2 * place, 2 * place + 2)) : null;
    const rare = chance !== null && chance < 50;
    const ends = at === span.text.length && MARKS_LAST.test(text);
    const token = element("span", { class: `token${rare ? " rare" : ""}${ends ? " frame" : ""}` });
    if (chance !== null) token.title = `token ${place + 1}: sampled with ${chance >= 99 ? "99 % or more" : `${chance} %`}`;
    words.append(appendText(token, text, view.needle, true));
  });
}

/**
 * A span that the agent read. Our frame is the text before the first opening tag and after the last closing tag,
 * where no untrusted text can be. Whatever looks like a frame between them belongs to the reply.
 */
function drawRead(words, text, needle) {
  const [opening, closing] = ["<interaction_response>", "</interaction_response>"];
  const from = text.indexOf(opening) + opening.length;
  const to = text.lastIndexOf(closing);
  if (from < opening.length || to < from) { drawMarked(words, text, needle); return; }
  const frame = (part) => element("span", { class: "tag frame" }, ...part.replaceAll("\n", "↵").split(/(?=<)/).flatMap((piece) => [piece, element("wbr")]));
  const reply = element("span", { class: "reply" });
  drawLong(reply, text.slice(from, to), needle);
  words.append(frame(text.slice(0, from)), reply, frame(text.slice(to)));
}

/** A text whose first and last marks of the chat template are folded. */
function drawMarked(words, text, needle) {
  const first = MARKS_FIRST.exec(text)?.[0] ?? "";
  const last = MARKS_LAST.exec(text.slice(first.length))?.[0] ?? "";
  const middle = element("span");
  drawLong(middle, text.slice(first.length, text.length - last.length), needle);
  const frame = (part) => part ? [element("span", { class: "tag frame" }, part.trim())] : [];
  words.append(...frame(first), middle, ...frame(last));
}

function toggleFrames() {
  const shown = $("detail").classList.toggle("framed");
  for (const box of document.querySelectorAll(".frames input")) box.checked = shown;
}

function drawLong(words, text, needle) {
  appendText(words, text.slice(0, LONG), needle);
  if (text.length <= LONG) return;
  const more = element("button", { class: "more", type: "button" }, `show all ${text.length.toLocaleString("en")} characters`);
  more.addEventListener("click", () => { words.replaceChildren(); appendText(words, text, needle); });
  words.append(element("br"), more);
}

function costLine(game) {
  if (game.total) {
    const { count, usd } = game.total;
    return element("p", { class: "bill" }, [`${count} call${count === 1 ? "" : "s"}`, usd ? dollars(usd) : "no cost"].join(" · "));
  }
  const wait = game.calls.reduce((sum, call) => sum + call.latency, 0);
  const usd = game.calls.reduce((sum, call) => sum + (call.usd ?? 0), 0);
  const wrote = game.spans.filter((span) => span.lengths !== undefined).reduce((sum, span) => sum + span.tokens, 0);
  const facts = [`${game.calls.length} call${game.calls.length === 1 ? "" : "s"}`, game.calls.length ? seconds(wait) : "", usd ? dollars(usd) : "no cost", wrote ? `${wrote} tokens written` : ""];
  return element("p", { class: "bill" }, facts.filter(Boolean).join(" · "));
}
