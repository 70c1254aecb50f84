// The tokens that the agent wrote: their numbers, and the tint that shows one of them.

const TOKENS_AT_ONCE = 3000; // a longer span is drawn as one token
const TINT = 40; // percent of the colour, at most

/** What each tint shows: its legend, and its value for a token, from -1 (orange) to 1 (blue). */
const TINTS = {
  advantage: { worse: "worse than the group: made less likely", better: "better: made likelier", of: ({ advantage }) => Math.tanh(advantage ?? 0) },
  "log-probability": { worse: "unlikely when it was sampled; full at −3 nats (5 %)", of: ({ logprob }) => (logprob ?? 0) / 3 },
  ratio: { better: "likelier at the update than when it was sampled; full at 1.2", worse: "less likely", of: ({ ratio }) => Math.log(ratio ?? 1) / Math.log(1.2) },
};

/** The tokens of a written span. Where their numbers are not known, the whole text is one. */
function tokensOf({ text, lengths, logprobs, ratios, advantage }) {
  if (!lengths || lengths.length > TOKENS_AT_ONCE) return [{ text, advantage }];
  const nats = (digits, place, zero) => (parseInt(digits.slice(2 * place, 2 * place + 2), 36) - zero) / 100;
  let at = 0;
  return [...lengths].map((digit, place) => ({
    text: text.slice(at, at += parseInt(digit, 36)),
    number: place + 1,
    logprob: logprobs ? nats(logprobs, place, 1295) : null,
    ratio: ratios ? Math.exp(nats(ratios, place, 648)) : null,
    advantage,
  }));
}

function drawToken(token, needle) {
  const node = appendText(element("span", { class: "token" }), token.text, needle, true);
  const strength = Math.min(1, Math.max(-1, TINTS[$("tint").value].of(token)));
  if (strength) node.style.background = `color-mix(in srgb, var(--${strength > 0 ? "better" : "worse"}) ${Math.round(TINT * Math.abs(strength))}%, transparent)`;
  node.addEventListener("pointerenter", () => $("token").replaceChildren(...describe(token)));
  return node;
}

/** The numbers of a token in words. */
function describe({ text, number, logprob, ratio, advantage }) {
  return [
    number && element("b", {}, `${number}. “${plain(text, 20)}”`),
    typeof logprob === "number" && `log-probability ${fixed(logprob)} (${logprob < -4.6 ? "under 1" : Math.round(100 * Math.exp(logprob))} %)`,
    typeof ratio === "number" && `ratio ${fixed(ratio)}`,
    advantage !== null ? `advantage ${signed(advantage)}` : "not trained on",
  ].filter(Boolean).flatMap((part, index) => index ? [" · ", part] : [part]);
}

/** What the colours of the selected question mean. */
function drawTintLegend(kind) {
  const { better, worse } = TINTS[$("tint").value];
  const keys = Object.entries({ better, worse, untrained: kind === "training" ? "written, not trained" : "written", read: "read" });
  $("tint-legend").replaceChildren(term($("tint").value), ...keys.filter(([, label]) => label).map(([style, label]) => element("span", { class: "key" }, element("i", { class: `swatch ${style}` }), label)));
  $("tokens").hidden = kind === "evaluation";
}
