// The curves of the page, in order, with their descriptions.

const ENDS = ["answered", "max_turns", "max_tokens", "malformed", "env_error"];
const END_NAMES = { answered: "answered", max_turns: "turn limit", max_tokens: "token limit", malformed: "malformed", env_error: "environment failed" };
const PHASES = ["rollout", "update", "validation", "save"];

const FAMILIES = [
  ["Does it learn?", [
    { title: "Validation EM", names: ["val/em"], floor: 0, ceiling: 1, about: "Share of exactly right answers in greedy games of held-out questions." },
    { title: "Reward", names: ["reward/mean"], ceiling: 1, about: "R of the sampled games (eq. 15): −ε without any format; F1 counts if the gate is open." },
    { title: "EM of sampled games", names: ["em"], floor: 0, ceiling: 1, about: "The same in sampled games of training questions." },
    { title: "Well-formed games", names: ["format"], floor: 0, ceiling: 1, about: "Every turn is a think block and one action; the last action is an answer." },
    { title: "Parts of the reward", names: ["reward/format", "reward/answer"], labels: ["format (eq. 12)", "answer (eq. 14)"], floor: 0, about: "A falling format with a rising answer is a sign of reward hacking." },
    { title: "Groups without spread", names: ["groups/no_spread"], floor: 0, ceiling: 1, about: "All games have the same reward and give no gradient; normal once most are right." },
  ]],
  ["How does it play?", [
    { title: "How games ended", ends: true, about: "The share of unanswered games should not grow." },
    { title: "Turns", names: ["turns"], floor: 1, about: "Per game. At 1, the agent answers without asking." },
    { title: "Tokens of a game", names: ["tokens/game"], floor: 0, about: "Written and read." },
  ]],
  ["Is the training healthy?", [
    { title: "Log-probability gap", names: ["engine/logprob_gap"], log: true, reference: 1e-4, about: "Engine against trainer, in nats. In float32 it should stay below the line." },
    { title: "KL to the start", names: ["kl", "kl_median"], labels: ["mean", "median"], log: true, about: "k3 per token. Single tokens can make the mean jump; the median should not rise." },
    { title: "Entropy", names: ["entropy"], floor: 0, about: "Nats per token. Near 0 there is no exploration." },
    { title: "Clipped tokens", names: ["clip_frac"], floor: 0, about: "Share of tokens whose ratio is outside the clip range (eq. 17)." },
    { title: "Gradient norm", names: ["grad_norm"], floor: 0, about: "Before clipping." },
    { title: "Lost groups", names: ["groups/dropped"], floor: 0, ceiling: 1, about: "Dropped because calls of the environment failed." },
  ]],
  ["What does it cost?", [
    { title: "Seconds per step", phases: true, about: "By phase." },
    { title: "Calls per step", names: ["env/paid", "env/reused"], labels: ["sent", "from the journal"], floor: 0, about: "To the environment." },
    { title: "Latency", names: ["env/latency"], floor: 0, about: "Median seconds of a call." },
    { title: "Dollars", names: ["env/usd"], floor: 0, about: "Total of the run so far." },
    { title: "Tokens per second", names: ["tokens/s"], floor: 0, about: "Sampled in the rollout." },
  ]],
];

/** The points of a metric, at the steps where it was measured. */
function pointsOf(run, name) {
  const { metrics } = run;
  const [values, low, high] = [metrics[name] ?? [], metrics[`${name}_low`], metrics[`${name}_high`]];
  return values.map((value, index) => {
    const point = { step: metrics.step[index], value };
    if (low?.[index] != null && high?.[index] != null) Object.assign(point, { low: low[index], high: high[index] });
    return point;
  }).filter((point) => point.value !== null);
}

function drawCurves(runs, onPick) {
  const all = runs.flatMap((run) => run.metrics.step ?? []);
  if (!all.length) { $("curves").append(element("p", { class: "empty" }, "No step has been logged yet.")); return; }
  const steps = [Math.min(...all), Math.max(...all, Math.min(...all) + 1)];
  for (const [title, specs] of FAMILIES) {
    const figures = specs.flatMap((spec) => figuresOf({ ...spec, onPick }, runs, steps));
    if (!figures.length) continue;
    $("curves").append(element("div", { class: "family" }, element("h3", {}, title), element("div", { class: "charts" }, ...figures)));
  }
  drawOthers(runs, steps, onPick);
}

function figuresOf(spec, runs, steps) {
  if (spec.ends || spec.phases) return runs.flatMap((run, index) => stackOf(spec, run, index, runs.length, steps));
  const series = runs.flatMap((run, index) => spec.names.map((name, place) => ({
    label: spec.labels ? spec.labels[place] + (runs.length > 1 ? ` · ${"AB"[index]}` : "") : "",
    style: `run-${"ab"[index]}${place ? " second" : ""}`,
    points: pointsOf(run, name),
  }))).filter((one) => one.points.length);
  const flat = series.every((one) => one.points.every((point) => point.value === 0));
  const letters = runs.length > 1 && spec.names.length === 1 ? series.map((one) => one.style.at(-1).toUpperCase()) : undefined;
  return series.length && !(flat && spec.names[0] === "env/usd") ? [drawChart({ ...spec, letters }, series, steps)] : [];
}

/** Shares of ends or seconds of phases, with a chart per run, because two stacks in one are unreadable. */
function stackOf(spec, run, index, count, steps) {
  const names = spec.ends ? ENDS.map((end) => `stop/${end}`) : PHASES.map((phase) => `time/${phase}`);
  const rows = names.map((name) => run.metrics[name]);
  const places = (run.metrics.step ?? []).map((_, place) => place).filter((place) => rows[0]?.[place] != null);
  if (!places.length) return [];
  const series = names.map((name, order) => ({
    label: spec.ends ? END_NAMES[ENDS[order]] : PHASES[order],
    style: spec.ends ? `c-${ENDS[order]}` : `c-phase-${order}`,
    points: places.map((place) => ({ step: run.metrics.step[place], value: rows[order]?.[place] ?? 0 })),
  })).filter((one) => one.points.some((point) => point.value > 0));
  const title = spec.title + (count > 1 ? ` · ${"AB"[index]}` : "");
  return series.length ? [drawChart({ ...spec, title, stacked: true, share: Boolean(spec.ends) }, series, steps)] : [];
}

/** All other metrics of metrics.jsonl, drawn when the panel is opened. */
function drawOthers(runs, steps, onPick) {
  const drawn = new Set(FAMILIES.flatMap(([, specs]) => specs.flatMap((spec) => spec.names ?? [])));
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) =>
    !drawn.has(name) && name !== "step" && !/^(stop|time)\/|_(low|high)$/.test(name)).sort();
  const panel = element("div", { class: "charts" });
  const details = element("details", { class: "family" }, element("summary", {}, `${names.length} more curves`), panel);
  details.addEventListener("toggle", () => {
    if (details.open && !panel.childElementCount) panel.append(...names.flatMap((name) => figuresOf({ title: plain(name), names: [name], onPick }, runs, steps)));
  });
  if (names.length) $("curves").append(details);
}
