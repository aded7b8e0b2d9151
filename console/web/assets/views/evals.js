// Evaluation: scores of held-out prompts over versions, each prompt over versions, and how they answered one of them.

import { failure, h, loading, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { any, number, short } from "../words.js";
import { chip, inLine, shadesOf } from "../answers.js";
import { chart } from "../chart.js";
import { table } from "../table.js";

// Between two looks of a page that is left open, and prompts of a page (PAGE of console/read/evals.py).
const EVERY_MS = 5000, PAGE = 40;
const ORDERS = [["worst", "the worst now"], ["unlearned", "the unlearned"], ["hardest", "the hardest"], ["line", "in order"]];

export function evals({ run }) {
  const scores = h("div", {}), answers = h("div", { "aria-live": "polite" }), charts = h("div", { class: "charts" }), grid = h("div", {}), kinds = h("div", {});
  const order = h("select", { onchange: () => prompts(0) }, ORDERS.map(([value, name]) => h("option", { value }, name)));
  const dataset = h("select", { onchange: () => { prompts(0); categories(); } });
  const more = h("button", { type: "button", class: "more", hidden: true, onclick: () => prompts(next) }, "More");
  const held = h("div", { hidden: true }, h("h2", {}, "Each prompt over versions"),
    h("div", { class: "filters" }, h("label", { class: "picker" }, h("span", {}, "Dataset"), dataset), h("label", { class: "picker" }, h("span", {}, "First"), order)),
    answers, grid, more, kinds, h("h2", {}, "Scores"), scores);
  const none = h("div", {}, loading());
  let close = () => {}, rows = [], next = null, turn = 0, asked = 0, shown = "";

  async function load() {
    asked = Date.now();
    try {
      const { rows: found, there } = await get(ofRun(run, "evals"));
      const now = JSON.stringify([found, there]);
      if (now === shown) return;
      shown = now;
      held.hidden = !found.length;
      if (!found.length) {
        replace(none, h("p", { class: "none" }, there ? "Nothing has been evaluated yet." : "This run keeps no history of its samples: set history.enabled, or start `penstock recorder`."));
        return;
      }
      replace(none);
      const names = [...new Set(found.map((one) => one.dataset))];
      const before = [...dataset.options].map((one) => one.value), chosen = dataset.value;
      if (String(names) !== String(before)) replace(dataset, names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
      draw(names, found);
      // Keep the rows if the user has loaded more prompts, or has the focus among them.
      if (rows.length <= PAGE && !grid.contains(document.activeElement)) prompts(0);
      categories();
    } catch (error) {
      shown = "";
      replace(none, failure(error));
    }
  }

  function draw(names, found) {
    const lines = names.map((name, colour) => {
      const mine = found.filter((one) => one.dataset === name && one.reward_mean !== null);
      return { name, colour, x: mine.map((one) => one.mean_version ?? one.version), y: mine.map((one) => one.reward_mean) };
    }).filter((one) => one.x.length);
    close();
    if (lines.length) {
      const made = chart({ title: "Reward of held-out prompts", unit: "mean, by mean version of the tokens", zero: true, xName: "version", lines });
      close = made.close;
      replace(charts, made.node);
    }
    replace(scores, table("Scores", [
      ["Dataset", (one) => one.dataset], ["Requested version", (one) => number(one.version), "number"], ["Mean version", (one) => number(one.mean_version, 2), "number"],
      ["Versions", (one) => one.oldest === one.newest ? number(one.oldest) : `${number(one.oldest)} to ${number(one.newest)}`, "number"],
      ["By requested", (one) => one.asked_share === null ? "" : `${number(100 * one.asked_share, 1)} %`, "number"], ["Prompts", (one) => number(one.prompts), "number"],
      ["Answers", (one) => number(one.answers), "number"], ["Mean", (one) => number(one.reward_mean, 3), "number"],
      ["Least", (one) => number(one.reward_min, 3), "number"], ["Greatest", (one) => number(one.reward_max, 3), "number"],
      ["pass@k", (one) => rates(one.pass_at)],
    ], found.toReversed()));
  }

  async function prompts(after) {
    const mine = ++turn;
    try {
      const found = await get(ofRun(run, "prompts"), { dataset: dataset.value, order: order.value, after });
      if (mine !== turn) return;
      rows = after ? [...rows, ...found.rows] : found.rows;
      next = found.next;
      more.hidden = next === null;
      replace(grid, matrix(found.versions, rows, look), h("p", { class: "count" }, `${number(rows.length)} of ${number(found.total)} prompts${found.versions_omitted ? `; ${number(found.versions_omitted)} earlier versions are omitted` : ""}`));
    } catch (error) {
      if (mine === turn) replace(grid, failure(error));
    }
  }

  // Where no prompt has a category there is nothing to tell apart.
  async function categories() {
    const asked = dataset.value;
    try {
      const { rows: found } = await get(ofRun(run, "categories"), { dataset: asked });
      if (asked !== dataset.value) return;
      const told = found.length > 1 || found.some((one) => Object.keys(one.majority_at).length);
      replace(kinds, told ? h("div", {}, h("h2", {}, `By category, version ${found[0].version}`), table("By category", [
        ["Category", (one) => said(one.category)], ["Prompts", (one) => number(one.prompts), "number"], ["Answers", (one) => number(one.answers), "number"],
        ["Mean", (one) => number(one.reward_mean, 3), "number"], ["pass@k", (one) => rates(one.pass_at)], ["Majority of k", (one) => rates(one.majority_at)],
      ], found)) : "");
    } catch (error) {
      if (asked === dataset.value) replace(kinds, failure(error));
    }
  }

  async function look({ line }) {
    try {
      const { rows: found, omitted } = await get(ofRun(run, "answers"), { dataset: dataset.value, line });
      const shade = shadesOf([0, 1, ...found.map((one) => one.reward)]);
      replace(answers, h("section", { class: "detail" },
        h("div", { class: "headed" }, h("h2", {}, `Prompt ${line} over versions`), h("button", { type: "button", onclick: () => replace(answers) }, "Close")),
        h("pre", { class: "text", tabindex: 0 }, said(found[0]?.prompt || "its text is not kept")), table("Answers", [
          ["Version", (one) => any(one.version), "number"], ["Reward", (one) => chip(one.reward, shade), "number"],
          ["Tokens", (one) => number(one.num_generated), "number"], ["Answer", (one) => said(one.answer, 1000)],
        ], found.toReversed()), omitted ? h("p", { class: "count" }, `${number(omitted)} answers of earlier versions are omitted; \`penstock eval show\` lists them`) : null));
      answers.scrollIntoView({ block: "start" });
    } catch (error) {
      replace(answers, failure(error));
    }
  }

  load();
  return {
    node: h("section", {}, h("h1", {}, "Evaluation"), none, charts, held),
    update(seen) {
      if (seen.live && Date.now() - asked >= EVERY_MS) load();
    },
    close: () => close(),
  };
}

const rates = (of) => Object.entries(of).map(([k, rate]) => `${k}: ${number(rate, 3)}`).join(", ");

// A row a prompt, a cell a version, its colour the reward.
function matrix(versions, rows, onRow) {
  const shade = shadesOf([0, 1, ...rows.flatMap((one) => one.rewards)]);
  const cell = (at) => ({ rewards }) => h("span", { class: `cell ${shade(rewards[at])}`, title: `version ${versions[at]}` }, rewards[at] === null ? "" : short(rewards[at]));
  return table("Prompts", [["Prompt", ({ line, prompt }) => h("span", {}, h("span", { class: "count" }, `${line} `), inLine(prompt, 60))],
    ...versions.map((version, at) => [String(version), cell(at), "cells"])], rows, onRow);
}
