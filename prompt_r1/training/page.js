"use strict";
const [text, kind, right] = ["text", "kind", "right"].map((id) => document.getElementById(id));
const groups = [...document.querySelectorAll(".group")];

/** Show the groups that the controls select. */
function filter() {
  const needle = text.value.trim().toLowerCase();
  let shown = 0;
  for (const group of groups) {
    const fits = (!kind.value || group.dataset.kind === kind.value) && (!right.value || group.dataset.right === right.value)
      && (!needle || group.textContent.toLowerCase().includes(needle));
    group.hidden = !fits;
    shown += fits;
  }
  document.getElementById("none").hidden = shown > 0;
}

for (const control of [text, kind, right]) control.addEventListener("input", filter);
document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
filter();
