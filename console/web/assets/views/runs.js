// The runs of the folder, the one that moved last first; sorted by a column whose head is pressed.

import { h, said } from "../dom.js";
import { number, duration } from "../words.js";
import { table } from "../table.js";
import { address } from "../place.js";

export function runs(known) {
  const columns = [
    ["Run", (one) => h("a", { href: address({ run: one.run, view: "overview" }) }, said(one.run)), "", "", (one) => one.run],
    ["State", (one) => one.state || "by hand", "", "", (one) => one.state],
    ["Step", (one) => number(one.step), "number", "", (one) => one.step],
    ["Reward", (one) => number(one.reward_mean, 3), "number", "", (one) => one.reward_mean],
    ["Held-out reward", (one) => number(one.accuracy, 3), "number", "", (one) => one.accuracy],
    ["Took", (one) => duration(one.active_s), "number", "", (one) => one.active_s],
    ["Last written", (one) => `${duration(one.age_s)} ago`, "number", "", (one) => one.age_s],
    ["Why", (one) => said(one.reason ?? "", 120)],
  ];
  const none = h("p", { class: "none" }, "There is no run here yet: `penstock run run.yaml` makes one.");
  return { node: h("section", {}, h("h1", {}, "Runs"), known.length ? table("Runs", columns, known) : none), close() {} };
}
