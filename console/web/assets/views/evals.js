// Evaluation: scores of held-out prompts over versions, and how each version answered one of them.

import { failure, h, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { any, number } from "../words.js";
import { chart } from "../chart.js";
import { table } from "../table.js";

export function evals({ run }) {
  const scores = h("div", {}), answers = h("div", {}), charts = h("div", { class: "charts" });
  const dataset = h("select", {}), line = h("input", { type: "number", min: 0, value: "0" });
  const ask = h("form", { class: "filters", hidden: true, onsubmit: (event) => { event.preventDefault(); look(); } },
    h("label", { class: "picker" }, h("span", {}, "Dataset"), dataset), h("label", { class: "picker" }, h("span", {}, "Prompt number"), line),
    h("button", { type: "submit" }, "Show its answers"));
  let close = () => {};

  async function load() {
    try {
      const { rows, there } = await get(ofRun(run, "evals"));
      ask.hidden = !rows.length;
      if (!rows.length) {
        replace(scores, h("p", { class: "none" }, there ? "Nothing has been evaluated yet." : "This run keeps no history of its samples: set history.enabled, or start `penstock recorder`."));
        return;
      }
      const names = [...new Set(rows.map((one) => one.dataset))];
      replace(dataset, names.map((name) => h("option", { value: name }, name)));
      draw(names, rows);
      look();
    } catch (error) {
      replace(scores, failure(error));
    }
  }

  function draw(names, rows) {
    const lines = names.map((name, colour) => {
      const mine = rows.filter((one) => one.dataset === name && one.reward_mean !== null);
      return { name, colour, x: mine.map((one) => one.version), y: mine.map((one) => one.reward_mean) };
    }).filter((one) => one.x.length);
    if (lines.length) {
      const made = chart({ title: "Reward of held-out prompts", unit: "mean, by version", zero: true, xName: "version", lines });
      close = made.close;
      replace(charts, made.node);
    }
    replace(scores, table("Scores", [
      ["Dataset", (one) => one.dataset], ["Version", (one) => number(one.version), "number"], ["Prompts", (one) => number(one.prompts), "number"],
      ["Answers", (one) => number(one.answers), "number"], ["Mean", (one) => number(one.reward_mean, 3), "number"],
      ["Least", (one) => number(one.reward_min, 3), "number"], ["Greatest", (one) => number(one.reward_max, 3), "number"],
    ], rows.toReversed()));
  }

  async function look() {
    try {
      const { rows } = await get(ofRun(run, "answers"), { dataset: dataset.value, line: line.value });
      replace(answers, rows.length ? [h("pre", { class: "text" }, said(rows[0].prompt || "its text is not kept")), table("Answers", [
        ["Version", (one) => any(one.version), "number"], ["Reward", (one) => number(one.reward, 3), "number"],
        ["Tokens", (one) => number(one.num_generated), "number"], ["Answer", (one) => said(one.answer, 1000)],
      ], rows)] : h("p", { class: "none" }, "This prompt has no answer."));
    } catch (error) {
      replace(answers, failure(error));
    }
  }

  load();
  return { node: h("section", {}, h("h1", {}, "Evaluation"), charts, scores, h("h2", {}, "One prompt over versions"), ask, answers), close: () => close() };
}
