// Starts the page: reads the data, draws head, curves and games, and handles the keys.

function drawHead(runs) {
  const names = listed(runs.map((run) => plain(run.name)));
  document.title = `Prompt-R1 · ${names}`;
  $("title").textContent = names;
  const values = (name) => [...new Set(runs.filter((run) => run.settings.agent).map((run) => plain(run.settings[name])))].join(", ");
  if (values("agent")) $("subtitle").textContent = `agent ${values("agent")} · environment ${values("env")} · seed ${values("seed")}`;
  if (runs.length > 1) $("run-legend").append(...runs.map((run, index) => element("span", { class: "key" }, runKey(index), `${LETTERS[index]}  ${plain(run.name)}`)));
  drawVerdicts(runs);
  $("summary").append(...runs.map((run, index) => figuresOfRun(run, runs.length > 1 ? LETTERS[index] : "")));
  drawSettings(runs);
}

/** A sentence about each run: whether it learned, and from what to what. */
function drawVerdicts(runs) {
  for (const [index, { verdict, settings, step: at }] of runs.entries()) {
    if (!verdict) continue;
    const steps = Number(settings.steps);
    const progress = steps > at ? ` Step ${at.toLocaleString("en")} of ${steps.toLocaleString("en")}.` : "";
    const letter = runs.length > 1 ? [element("b", {}, `${LETTERS[index]}  `)] : [];
    $("verdicts").append(element("p", { class: `verdict ${verdict.kind}` }, ...letter, verdict.text, progress));
  }
}

/** The key figures of a run. */
function figuresOfRun(run, letter) {
  const box = element("dl", { class: "figures" });
  if (letter) box.append(element("div", { class: "run-name" }, `${letter}  ${plain(run.name)}`));
  const add = (label, value, small = "") => box.append(element("div", { class: "figure" }, element("dt", {}, ...[label].flat()), element("dd", {}, value, element("small", {}, ...[small].flat()))));
  const last = (name) => pointsOf(run, name).at(-1);
  const total = (name) => pointsOf(run, name).reduce((sum, point) => sum + point.value, 0);
  const tested = pointsOf(run, "val/em");
  // The best step as train.py chooses it: by EM, then by reward; the first of equal ones.
  const rewards = new Map(pointsOf(run, "val/reward").map((point) => [point.step, point.value]));
  const ahead = (a, b) => a.value - b.value || (rewards.get(a.step) ?? 0) - (rewards.get(b.step) ?? 0);
  const best = tested.reduce((top, point) => !top || ahead(point, top) > 0 ? point : top, null);
  const interval = (point) => point?.low === undefined ? "" : ` [${number(point.low, 2)}, ${number(point.high, 2)}]`;
  if (best) add(["validation ", term("EM")], `${number(tested[0].value, 2)} → ${number(best.value, 2)}`, `best at step ${best.step}${interval(best)}`);
  const reward = last("reward/mean");
  if (reward) add(term("reward"), number(reward.value, 2), `step ${reward.step}${interval(reward)}`);
  if (last("format")) add(term("well-formed"), number(last("format").value, 2), "of the games of the last step");
  const gap = Math.max(0, ...pointsOf(run, "engine/logprob_gap").map((point) => point.value));
  if (gap) add(term("log-probability gap"), `${number(gap)} nats`, "largest of all steps");
  const shown = run.groups.reduce((sum, group) => sum + group.games.length, 0);
  const evaluated = isEvaluation(run);
  const steps = run.steps.shown < run.steps.all ? `of ${run.steps.shown} of ${run.steps.all} steps` : `of all ${run.steps.all} steps`;
  add(evaluated ? "answers here" : "games here", shown.toLocaleString("en"), evaluated ? "of an evaluation" : steps);
  if (evaluated) { addSystems(run, add); return box; }
  const calls = callsOf(run);
  add("calls", calls.total.toLocaleString("en"), calls.made + calls.answered);
  add("cost", last("env/usd")?.value ? dollars(last("env/usd").value) : "$0", last("env/lost_usd")?.value ? `at most ${dollars(last("env/lost_usd").value)} more for lost attempts` : last("env/usd")?.value ? "" : "no priced call");
  const time = PHASES.reduce((sum, phase) => sum + total(`time/${phase}`), 0);
  if (time) add("time", seconds(time), "rollout, update, validation, saving");
  return box;
}

/** Of each system of an evaluation, how many answers are right; long texts have no right answer. */
function addSystems(run, add) {
  const judged = run.groups.flatMap((group) => group.games).filter((game) => game.right !== null && game.stop !== "env_error");
  for (const player of [...new Set(judged.map((game) => game.player))].slice(0, 12)) {
    const own = judged.filter((game) => game.player === player);
    const right = own.filter((game) => game.right).length;
    add(plain(player), `${right} of ${own.length}`, `right: ${number(right / own.length, 2)}`);
  }
}

/** The calls of a run: by the games that made them, and by how they were answered. Both sums are the total. */
function callsOf(run) {
  const total = (...names) => Math.round(names.flatMap((name) => pointsOf(run, name)).reduce((sum, point) => sum + point.value, 0));
  const text = (parts) => parts.filter(([, count]) => count).map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(" + ");
  const answered = [["sent", total("env/paid")], ["from the journal", total("env/reused")], ["failed", total("env/errors", "val/errors")]];
  const sum = (parts) => parts.reduce((all, [, count]) => all + count, 0);
  const made = [["in training", total("env/calls")], ["in validation", total("val/calls")]];
  // Runs of older versions did not count the calls of validation.
  return { total: sum(answered), made: sum(made) === sum(answered) ? `${text(made)} = ` : "", answered: text(answered) };
}

/** The settings under the headings of --help-all; those without one, of an older version, come last. */
function drawSettings(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.settings)));
  if (!names.size) { $("settings").remove(); return; }
  const row = ([name, about]) => {
    names.delete(name);
    const values = runs.map((run) => run.settings[name] ?? "");
    return element("tr", { class: new Set(values).size > 1 ? "differs" : "" }, element("td", { class: "muted", title: about }, plain(name)),
      ...values.map((value) => element("td", {}, value === "" ? "–" : plain(value, 200))));
  };
  const letters = runs.length > 1 ? [element("tr", {}, element("td", {}), ...runs.map((_, index) => element("th", { scope: "col" }, LETTERS[index])))] : [];
  const table = (title, settings) => element("table", {}, element("caption", {}, title), ...letters.map((one) => one.cloneNode(true)), ...settings.map(row));
  for (const { title, settings } of (runs.find((run) => run.sections.length) ?? { sections: [] }).sections) {
    const given = settings.filter(([name]) => names.has(name));
    if (given.length) $("settings").querySelector(".wide").append(table(title, given));
  }
  if (names.size) $("settings").querySelector(".wide").append(table("others", [...names].map((name) => [name, ""])));
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
  m: toggleFrames, w: () => showWords(), c: () => $("filters").reset(), "?": () => $("help").showModal(),
};

function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, select, textarea")) { if (event.key === "Escape") event.target.blur(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open || $("words").open || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  $("theme").addEventListener("click", nextTheme);
  $("help-button").addEventListener("click", KEYS["?"]);
  $("words-button").addEventListener("click", KEYS.w);
  addEventListener("hashchange", showLinked);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.choice));
}

/** Show the game that the address names, as in report.html#step=20&game=bridge-7/3. */
function showLinked() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (!wanted.has("game") && !wanted.has("step")) return;
  const [, id = "", place = "1"] = /^(.*?)(?:\/(\d+))?$/s.exec(wanted.get("game") ?? "");
  const [kind, run] = [wanted.get("of") ?? "training", Math.max(0, LETTERS.indexOf(wanted.get("run") ?? "A"))];
  if (!id) { showStep(Number(wanted.get("step"))); return; }
  const found = browser.entries.find((entry) => entry.id === id && entry.kind === kind && entry.groups[run]
    && (!wanted.has("step") || entry.step === Number(wanted.get("step"))));
  if (!found) { $("count").textContent = `The game of the link, ${plain(id, 60)}, is not in this report`; return; }
  if (!browser.shown.includes(found)) { for (const field of $("filters").querySelectorAll("input, select")) field.value = field.id === "order" ? "step" : ""; applyFilters(); }
  select(browser.shown.indexOf(found));
  const card = document.querySelectorAll("#detail .players")[found.groups.slice(0, run).filter(Boolean).length].children[Number(place) - 1];
  card?.classList.add("linked");
  card?.scrollIntoView({ block: "center", inline: "center" });
}

/** Load the page again every few seconds, with the same filters, until the run has ended. */
function startReloading(every) {
  const fields = [...$("filters").querySelectorAll("input, select")];
  let kept = {};
  try { kept = JSON.parse(sessionStorage.getItem("prompt-r1-view") ?? "{}"); } catch { /* begin without filters */ }
  for (const field of fields) if (kept[field.id]) field.value = kept[field.id];
  if (Object.values(kept).some(Boolean)) applyFilters();
  const button = element("button", { type: "button", id: "live", title: "Stop and go on" }, "● live");
  let running = true;
  button.addEventListener("click", () => { running = !running; button.textContent = running ? "● live" : "‖ paused"; });
  document.querySelector(".tools").prepend(button);
  setInterval(() => {
    if (!running || document.querySelector("dialog[open]") || document.activeElement.matches("input, select")) return;
    try { sessionStorage.setItem("prompt-r1-view", JSON.stringify(Object.fromEntries(fields.map((field) => [field.id, field.value])))); } catch { /* without storage the filters are lost */ }
    location.reload();
  }, every * 1000);
}

function main() {
  setTheme(storedTheme());
  const { runs, live } = JSON.parse($("data").textContent);
  $("data").remove();
  document.documentElement.classList.toggle("comparing", runs.length > 1);
  document.documentElement.classList.toggle("many", runs.length > 2);
  drawHead(runs);
  if (runs.every(isEvaluation)) $("curves").parentElement.hidden = true;
  else drawCurves(runs, showStep);
  startBrowser(runs);
  listenToKeys();
  showLinked();
  if (live) startReloading(live);
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

main();
