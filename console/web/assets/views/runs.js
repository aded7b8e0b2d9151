// The runs of the folder, the one that moved last first.

import { h, said } from "../dom.js";
import { number, duration } from "../words.js";
import { table } from "../table.js";
import { address } from "../place.js";

export function runs(known) {
  const columns = [
    ["Run", (one) => h("a", { href: address({ run: one.run, view: "overview" }) }, said(one.run))],
    ["State", (one) => one.state || "by hand"],
    ["Step", (one) => number(one.step), "number"],
    ["Reward", (one) => number(one.reward_mean, 3), "number"],
    ["Held-out reward", (one) => number(one.accuracy, 3), "number"],
    ["Took", (one) => duration(one.active_s), "number"],
    ["Last written", (one) => `${duration(one.age_s)} ago`, "number"],
    ["Why", (one) => said(one.reason ?? "", 120)],
  ];
  const none = h("p", { class: "none" }, "There is no run here yet: `penstock run run.yaml` makes one.");
  return { node: h("section", {}, h("h1", {}, "Runs"), known.length ? table("Runs", columns, known) : none), close() {} };
}
