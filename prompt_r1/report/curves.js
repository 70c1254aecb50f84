// The curves of the page, in order, with their descriptions.

const ENDS = ["answered", "max_turns", "max_tokens", "malformed", "env_error"];
const END_NAMES = { answered: "answered", max_turns: "turn limit", max_tokens: "token limit", malformed: "malformed", env_error: "environment failed" };
const PHASES = ["rollout", "update", "validation", "save"];

const FAMILIES = [
  ["Does it learn?", [
    { title: "Validation EM", word: "EM", names: ["val/em"], floor: 0, ceiling: 1, about: "Share of exactly right answers in greedy games of held-out questions." },
    { title: "Reward", word: "reward", names: ["reward/mean"], ceiling: 1, about: "Mean of the sampled games. The answer counts only in games of the right form." },
    { title: "EM of sampled games", word: "EM", names: ["em"], floor: 0, ceiling: 1, about: "Share of exactly right answers in the training games." },
    { title: "Well-formed games", word: "well-formed", names: ["format"], floor: 0, ceiling: 1, about: "Share of games with a think block and one action in every turn, and an answer in the last." },
    { title: "Parts of the reward", word: "format", names: ["reward/format", "reward/answer"], labels: ["format (eq. 12)", "answer (eq. 14)"], floor: 0, about: "A falling format with a rising answer is a sign of reward hacking." },
    { title: "Groups without spread", word: "spread", names: ["groups/no_spread"], floor: 0, ceiling: 1, about: "Share of questions whose games all have the same reward: nothing is learned from them. Normal once most are right." },
  ]],
  ["How does it play?", [
    { title: "How games ended", ends: true, about: "The share of unanswered games should not grow." },
    { title: "Turns", names: ["turns"], floor: 1, unit: "per game", about: "At 1, the agent answers without asking." },
    { title: "Tokens", word: "token", names: ["tokens/game"], floor: 0, unit: "per game", about: "Written and read." },
  ]],
  ["Is the training healthy?", [
    { title: "Log-probability gap", word: "log-probability gap", names: ["engine/logprob_gap", "engine/logprob_gap_p99", "engine/logprob_gap_mean"], labels: ["largest", "99 %", "mean"], log: true, unit: "nats", reference: 1e-4, about: "Engine against trainer. In float32 it should stay below the line." },
    { title: "Importance weights", word: "importance weight", names: ["engine/importance_mean", "engine/importance_truncated"], labels: ["mean", "share truncated"], usual: [1, 0], floor: 0, about: "Correct for the gap in 16 bits. Far from 1, engine and trainer disagree." },
    { title: "KL to the start", word: "KL", names: ["kl", "kl_median"], labels: ["mean", "median"], log: true, unit: "nats per token", about: "Single tokens can make the mean jump; the median should not rise." },
    { title: "Entropy", word: "entropy", names: ["entropy"], floor: 0, unit: "nats per token", about: "Near 0 there is no exploration." },
    { title: "Clipped tokens", word: "clip", names: ["clip_frac"], floor: 0, unit: "share", about: "Tokens that changed by more than the clip range (eq. 17)." },
    { title: "Gradient norm", word: "gradient norm", names: ["grad_norm"], floor: 0, about: "Before clipping." },
    { title: "Lost groups", word: "group", names: ["groups/dropped"], floor: 0, ceiling: 1, unit: "share", about: "Dropped because calls of the environment failed." },
  ]],
  ["What does it cost?", [
    { title: "Time of a step", phases: true, unit: "s", about: "By phase." },
    { title: "Calls", word: "journal", names: ["env/paid", "env/reused"], labels: ["sent", "from the journal"], floor: 0, unit: "per step", about: "Of training and validation games to the environment." },
    { title: "Latency", names: ["env/latency"], floor: 0, duration: true, about: "Median time of a call." },
    { title: "Spent", names: ["env/usd", "env/lost_usd"], labels: ["on replies", "at most, on lost attempts"], usual: [0, 0], floor: 0, unit: "$", about: "Total of the run so far." },
    { title: "Speed", names: ["tokens/s"], floor: 0, unit: "tokens per second", about: "Sampled in the rollout." },
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

/** The charts of a spec; none where every value is the usual one. */
function figuresOf(spec, runs, steps) {
  if (spec.ends || spec.phases) return runs.flatMap((run, index) => stackOf(spec, run, index, runs.length, steps));
  const series = runs.flatMap((run, index) => spec.names.map((name, place) => ({
    label: spec.labels ? spec.labels[place] + (runs.length > 1 ? ` · ${LETTERS[index]}` : "") : "",
    style: `${runStyle(index)}${place ? " second" : ""}`,
    points: pointsOf(run, name),
    usual: spec.usual?.[place],
  }))).filter((one) => one.points.length);
  const telling = !spec.usual || series.some((one) => one.points.some((point) => point.value !== one.usual));
  const letters = runs.length > 1 && spec.names.length === 1 ? series.map((one) => one.style.at(-1).toUpperCase()) : undefined;
  return series.length && telling ? [drawChart(...inUnits({ ...spec, letters }, series), steps)] : [];
}

/** A duration in milliseconds if no value reaches a second: seconds would need powers of ten. */
function inUnits(spec, series) {
  if (!spec.duration) return [spec, series];
  const short = series.every((one) => one.points.every((point) => point.value < 1));
  const scaled = (point) => ({ ...point, value: point.value * 1000 });
  return [{ ...spec, unit: short ? "ms" : "s" }, short ? series.map((one) => ({ ...one, points: one.points.map(scaled) })) : series];
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
  const title = spec.title + (count > 1 ? ` · ${LETTERS[index]}` : "");
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
