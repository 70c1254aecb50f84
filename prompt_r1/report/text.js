"use strict";
// Elements, numbers, and texts of models: through textContent only, with control characters made visible.

const $ = (id) => document.getElementById(id);
const LETTERS = "AB"; // of the two runs of a comparison
const sum = (values) => values.reduce((all, value) => all + value, 0);
const mean = (values) => values.length ? sum(values) / values.length : null;

/** A function that makes an element with attributes and children; strings become text. */
const maker = (create) => (name, attributes = {}, ...children) => {
  const node = create(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const element = maker((name) => document.createElement(name));
const shape = maker((name) => document.createElementNS("http://www.w3.org/2000/svg", name));

// Characters of the Unicode categories that terminal.py escapes too (control, format, surrogate, private,
// unassigned, line and paragraph separators), except tab and line feed. They are shown as U+XXXX.
const HIDDEN = /(?![\t\n])[\p{C}\p{Zl}\p{Zp}]/gu;
const TAG = /<\|\w{1,40}\|>|<\/?(?:think|interaction_prompt|interaction_response|answer)>/;
const codePoint = (letter) => "U+" + letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");

/** A text for one line: cut at `length`, with control characters as U+XXXX. */
function plain(text, length = 300) {
  const short = text.length > length ? text.slice(0, length) + "…" : text;
  return short.replace(HIDDEN, (found) => `[${codePoint(found)}]`);
}

/** Append a text. Control characters, matches of `needle` and, in the agent's text, tags are marked. */
function appendText(node, text, needle = "", tags = false) {
  const kinds = [`(?<control>${HIDDEN.source})`];
  if (tags) kinds.push(`(?<tag>${TAG.source})`);
  if (needle) kinds.push(`(?<found>${needle.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&")})`);
  let end = 0;
  for (const match of text.matchAll(new RegExp(kinds.join("|"), "giu"))) {
    const kind = Object.keys(match.groups).find((name) => match.groups[name]);
    const shown = kind === "control" ? codePoint(match[0]) : match[0];
    node.append(text.slice(end, match.index), element("span", { class: kind }, shown));
    end = match.index + match[0].length;
  }
  node.append(text.slice(end));
  return node;
}

const minus = (text) => text.replace("-", "−");
const fixed = (value) => minus(value.toFixed(2));
const signed = (value) => (value > 0 ? "+" : value < 0 ? "" : "±") + fixed(value);
const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const dollars = (value) => "$" + value.toFixed(value >= 1 ? 2 : value >= 0.01 ? 4 : 6);

/** Format a number with three or four digits, such as 1.3e-5 or 12.5k. */
function number(value, digits = 3) {
  const size = Math.abs(value);
  if (size && size < 0.001) return value.toExponential(1);
  if (size >= 1e4) return size >= 1e6 ? `${(value / 1e6).toFixed(2)}M` : `${(value / 1e3).toFixed(1)}k`;
  if (Number.isInteger(value)) return minus(String(value));
  return minus(value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : digits));
}

function seconds(value) {
  if (value >= 60) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return `${(value * 1000).toFixed(value >= 0.001 || !value ? 0 : 2)} ms`;
}
