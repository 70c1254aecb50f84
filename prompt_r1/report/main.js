// Starts the page: reads the data, and draws head, curves and games.

function drawHead(runs) {
  const names = runs.map((run) => plain(run.name)).join(" and ");
  const letter = (index) => runs.length > 1 ? `${LETTERS[index]}  ` : "";
  document.title = `Prompt-R1 · ${names}`;
  $("title").textContent = names;
  const values = (name) => [...new Set(runs.map((run) => plain(run.settings[name] ?? "")))].join(", ");
  if (values("agent")) $("subtitle").textContent = `agent ${values("agent")} · environment ${values("env")} · seed ${values("seed")}`;
  if (runs.length > 1) $("run-legend").append(...runs.map((run, index) => element("span", { class: "key" }, runKey(index), letter(index) + plain(run.name))));
  runs.forEach((run, index) => {
    const { verdict, settings, step } = run;
    const progress = Number(settings.steps) > step ? ` Step ${step.toLocaleString("en")} of ${Number(settings.steps).toLocaleString("en")}.` : "";
    if (verdict) $("verdicts").append(element("p", { class: `verdict ${verdict.kind}` }, element("b", {}, letter(index)), verdict.text, progress));
    const figures = isEvaluation(run) ? figuresOfEvaluation(run) : figuresOfRun(run);
    $("summary").append(element("dl", { class: "figures" }, element("div", { class: "run-name" }, runs.length > 1 ? letter(index) + plain(run.name) : ""),
      ...figures.map(([label, value, small]) => element("div", { class: "figure" }, element("dt", {}, ...[label].flat()), element("dd", {}, value, element("small", {}, small))))));
  });
  drawSettings(runs);
}

/** The key figures of a run: label, value and small print. */
function figuresOfRun(run) {
  const last = (name) => pointsOf(run, name).at(-1);
  const total = (...names) => sum(names.flatMap((name) => pointsOf(run, name)).map((point) => point.value));
  const interval = ({ low, high }) => low === undefined ? "" : ` [${number(low, 2)}, ${number(high, 2)}]`;
  const validated = pointsOf(run, "val/em");
  // The best step as train.py chooses it: by EM, then by reward; the first of equal ones.
  const rewards = new Map(pointsOf(run, "val/reward").map((point) => [point.step, point.value]));
  const ahead = (a, b) => b.value - a.value || (rewards.get(b.step) ?? 0) - (rewards.get(a.step) ?? 0);
  const [best] = validated.toSorted(ahead);
  const [reward, format] = [last("reward/mean"), last("format")];
  const games = sum(run.groups.map((group) => group.games.length));
  const calls = { sent: total("env/paid"), "from the journal": total("env/reused"), failed: total("env/errors", "val/errors") };
  const [spent, lost] = [last("env/usd")?.value, last("env/lost_usd")?.value];
  const time = total("time/rollout", "time/update", "time/validation", "time/save");
  return [
    best && [["validation ", term("EM")], `${number(validated[0].value, 2)} → ${number(best.value, 2)}`, `best at step ${best.step}${interval(best)}`],
    reward && [term("reward"), number(reward.value, 2), `step ${reward.step}${interval(reward)}`],
    format && [term("well-formed"), number(format.value, 2), "of the games of the last step"],
    ["games here", games.toLocaleString("en"), run.steps_shown < run.steps ? `of ${run.steps_shown} of ${run.steps} steps` : `of all ${run.steps} steps`],
    ["calls", sum(Object.values(calls)).toLocaleString("en"), Object.entries(calls).filter(([, count]) => count).map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(" + ")],
    ["cost", spent ? dollars(spent) : "$0", lost ? `at most ${dollars(lost)} more for lost attempts` : spent ? "" : "no priced call"],
    time && ["time", seconds(time), "rollout, update, validation, saving"],
  ].filter(Boolean);
}

/** Of each system of an evaluation, how many answers are right; long texts have no right answer. */
function figuresOfEvaluation(run) {
  const answers = run.groups.flatMap((group) => group.games);
  const players = Map.groupBy(judged(answers), (game) => game.player);
  return [["answers here", answers.length.toLocaleString("en"), "of an evaluation"],
    ...[...players].slice(0, 12).map(([player, own]) => [plain(player), `${rightOf(own)} of ${own.length}`, `right: ${number(rightOf(own) / own.length, 2)}`])];
}

/** The settings of config.yaml; those in which two runs differ are bold. */
function drawSettings(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  $("settings").hidden = !names.length;
  $("settings").querySelector("table").append(...names.map((name) => {
    const values = runs.map((run) => plain(run.settings[name] ?? "", 200) || "–");
    return element("tr", { class: new Set(values).size > 1 ? "differs" : "" }, element("td", { class: "muted" }, plain(name)), ...values.map((value) => element("td", {}, value)));
  }));
}

/** Show the games of the step that is nearest. */
function showStep(step) {
  const at = [...$("step").options].map((option) => option.value).filter(Boolean).sort((a, b) => Math.abs(a - step) - Math.abs(b - step));
  $("step").value = at[0] ?? "";
  applyFilters();
  $("games").scrollIntoView({ block: "start" });
}

const runs = JSON.parse($("data").textContent);
$("data").remove();
document.documentElement.classList.toggle("comparing", runs.length > 1);
drawHead(runs);
if (runs.every(isEvaluation)) $("curves").parentElement.hidden = true;
else drawCurves(runs, showStep);
startBrowser(runs);
document.documentElement.dataset.ready = String(Math.round(performance.now()));
