// Every curve, over steps or over time.

import { failure, h, loading, replace } from "../dom.js";
import { drawn, read } from "../charts.js";

const EVERY_MS = 3000;

export function curves({ run, other }) {
  const grid = h("div", { class: "charts" }, loading());
  const note = h("p", { class: "none", hidden: true }, "Nothing has been written yet: curves begin with the first step.");
  const choices = [["step", "Steps"], ["up_s", "Seconds that it was up"]].map(([by, name]) =>
    h("button", { type: "button", "aria-pressed": String(by === "step"), onclick: () => choose(by) }, name));
  const smoothing = h("input", { type: "checkbox", checked: true, onchange: () => draw() });
  let by = "step", found = [], moved = "", asked = 0, close = () => {};

  function choose(wanted) {
    by = wanted;
    choices.forEach((button, at) => button.setAttribute("aria-pressed", String(by === ["step", "up_s"][at])));
    draw();
  }

  function draw() {
    close();
    const made = drawn(found, run, other, by, smoothing.checked);
    close = made.close;
    note.hidden = found.length > 0;
    replace(grid, made.nodes);
  }

  async function load() {
    asked = Date.now();
    try {
      found = await read(run, other);
      draw();
    } catch (error) {
      replace(grid, failure(error));
    }
  }

  load();
  return {
    node: h("section", {}, h("div", { class: "headed" }, h("h1", {}, "Curves"),
      h("div", { class: "filters" }, h("label", { class: "picker" }, smoothing, "Smoothed"),
        h("div", { class: "choice", role: "group", "aria-label": "What lies along the bottom" }, choices))), note, grid),
    update(seen) {
      const now = String(seen.moved);
      if (moved && now !== moved && Date.now() - asked < EVERY_MS) return;
      if (moved && now !== moved && !grid.contains(document.activeElement)) load();
      moved = now;
    },
    close: () => close(),
  };
}
