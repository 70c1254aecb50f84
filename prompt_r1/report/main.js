// Starts the page: reads the data, draws head, curves and games, and handles the keys.

function drawHead(runs) {
  document.title = `Prompt-R1 · ${runs.map((run) => plain(run.name)).join(" and ")}`;
  $("title").textContent = runs.map((run) => plain(run.name)).join(" and ");
  $("subtitle").textContent = runs.map(({ settings: s }) => s.agent ? `agent ${plain(s.agent)} · environment ${plain(s.env)} · seed ${plain(s.seed)}` : "").filter((text, index, all) => text && all.indexOf(text) === index).join(" · ");
  if (runs.length > 1) $("run-legend").append(...runs.map((run, index) => element("span", { class: "key" }, runKey(index), `${"AB"[index]}  ${plain(run.name)}`)));
  $("summary").append(...runs.map((run, index) => figuresOfRun(run, runs.length > 1 ? "AB"[index] : "")));
  drawSettings(runs);
}

/** The key figures of a run. */
function figuresOfRun(run, letter) {
  const box = element("dl", { class: "figures" });
  if (letter) box.append(element("div", { class: "run-name" }, `${letter}  ${plain(run.name)}`));
  const add = (label, value, small = "") => box.append(element("div", { class: "figure" }, element("dt", {}, label), element("dd", {}, value, element("small", {}, small))));
  const last = (name) => pointsOf(run, name).at(-1);
  const total = (name) => pointsOf(run, name).reduce((sum, point) => sum + point.value, 0);
  const tested = pointsOf(run, "val/em");
  // The best step as train.py chooses it: by EM, then by reward; the first of equal ones.
  const rewards = new Map(pointsOf(run, "val/reward").map((point) => [point.step, point.value]));
  const ahead = (a, b) => a.value - b.value || (rewards.get(a.step) ?? 0) - (rewards.get(b.step) ?? 0);
  const best = tested.reduce((top, point) => !top || ahead(point, top) > 0 ? point : top, null);
  const interval = (point) => point?.low === undefined ? "" : ` [${number(point.low, 2)}, ${number(point.high, 2)}]`;
  if (best) add("validation EM", `${number(tested[0].value, 2)} → ${number(best.value, 2)}`, `best at step ${best.step}${interval(best)}`);
  const reward = last("reward/mean");
  if (reward) add("reward", number(reward.value, 2), `step ${reward.step}${interval(reward)}`);
  if (last("format")) add("well-formed", number(last("format").value, 2), "of the games of the last step");
  const gap = Math.max(0, ...pointsOf(run, "engine/logprob_gap").map((point) => point.value));
  if (gap) add("log-probability gap", number(gap), "largest of all steps");
  const shown = run.groups.reduce((sum, group) => sum + group.games.length, 0);
  add("games here", shown.toLocaleString("en"), run.steps.shown < run.steps.all ? `of ${run.steps.shown} of ${run.steps.all} steps` : `of all ${run.steps.all} steps`);
  add("calls", Math.round(total("env/calls")).toLocaleString("en"), "in training");
  add("cost", last("env/usd")?.value ? dollars(last("env/usd").value) : "$0", last("env/usd")?.value ? "" : "no priced call");
  const time = PHASES.reduce((sum, phase) => sum + total(`time/${phase}`), 0);
  if (time) add("time", seconds(time), "rollout, update, validation, saving");
  return box;
}

function drawSettings(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  const rows = names.map((name) => {
    const values = runs.map((run) => run.settings[name] ?? "");
    return element("tr", { class: new Set(values).size > 1 ? "differs" : "" }, element("td", { class: "muted" }, plain(name)), ...values.map((value) => element("td", {}, plain(value, 200))));
  });
  if (!rows.length) $("settings").remove();
  else $("settings").querySelector("table").append(...rows);
}

function setTheme(choice) {
  const dark = choice === "dark" || (choice === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.documentElement.dataset.choice = choice;
  $("theme").textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[choice];
}

function nextTheme() {
  const choices = ["auto", "light", "dark"];
  setTheme(choices[(choices.indexOf(document.documentElement.dataset.choice) + 1) % choices.length]);
  try { localStorage.setItem("prompt-r1-theme", document.documentElement.dataset.choice); } catch { /* without storage the choice is not kept */ }
}

function storedTheme() {
  try { return ["light", "dark"].find((choice) => choice === localStorage.getItem("prompt-r1-theme")) ?? "auto"; } catch { return "auto"; }
}

function showStep(step) {
  const at = [...$("step").options].map((option) => option.value).filter(Boolean).map(Number);
  if (!at.length) return;
  const nearest = at.reduce((best, one) => Math.abs(one - step) < Math.abs(best - step) ? one : best);
  $("step").value = String(nearest);
  applyFilters();
  $("games").scrollIntoView({ block: "start" });
}

function moveStep(move) {
  const menu = $("step");
  menu.selectedIndex = Math.min(menu.options.length - 1, Math.max(0, menu.selectedIndex + move));
  applyFilters();
}

function moveGame(move) {
  const cards = [...document.querySelectorAll("#detail .game")];
  const next = cards[Math.min(cards.length - 1, Math.max(0, cards.indexOf(document.activeElement) + move))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

const KEYS = {
  j: () => select(browser.selected + 1), k: () => select(browser.selected - 1), l: () => moveGame(1), h: () => moveGame(-1),
  "]": () => moveStep(1), "[": () => moveStep(-1), "/": () => $("search").focus(), t: nextTheme,
  o: () => { browser.opening = !browser.opening; showSelected(); }, p: () => $("detail").classList.toggle("marking"),
  c: () => $("filters").reset(), "?": () => $("help").showModal(),
};

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  $("theme").addEventListener("click", nextTheme);
  $("help-button").addEventListener("click", KEYS["?"]);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.choice));
}

function main() {
  setTheme(storedTheme());
  const { runs } = JSON.parse($("data").textContent);
  $("data").remove();
  document.documentElement.classList.toggle("comparing", runs.length > 1);
  drawHead(runs);
  drawCurves(runs, showStep);
  startBrowser(runs);
  listenToKeys();
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

main();
