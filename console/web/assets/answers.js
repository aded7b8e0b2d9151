// Short views of answers: a reward as a chip coloured by its rank among others, prompt and answer in one line.

import { h, said } from "./dom.js";
import { number, short } from "./words.js";

const SHADES = 5;

// Colour scale over rewards; returns the CSS class of a reward.
export function shadesOf(rewards) {
  const known = rewards.filter((one) => typeof one === "number");
  const low = Math.min(...known), high = Math.max(...known);
  return (reward) => (typeof reward !== "number" ? "none" : low < high
    ? `r${Math.min(SHADES - 1, Math.floor(SHADES * (reward - low) / (high - low)))}` : `r${SHADES - 1}`);
}

export function chip(reward, shade) {
  return h("span", { class: `reward ${shade(reward)}` }, typeof reward === "number" ? short(reward) : "none");
}

export const inLine = (text, most = 140) => said((text ?? "").replace(/\s+/g, " "), most);

// Samples by group: one card per group with the answers of its prompt.
export function groups(rows, onOpen) {
  const shade = shadesOf(rows.map((one) => one.reward));
  const byJob = Map.groupBy(rows, (one) => one.job);
  return h("div", { class: "groups" }, [...byJob].map(([job, mine]) => card(job, mine, shade, onOpen)));
}

function card(job, rows, shade, onOpen) {
  const rewards = rows.map((one) => one.reward).filter((one) => typeof one === "number");
  const mean = rewards.length ? rewards.reduce((sum, one) => sum + one, 0) / rewards.length : null;
  const sorted = rows.toSorted((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  return h("article", { class: "group" },
    h("div", { class: "headed" }, h("h3", {}, said(job, 60)), h("span", { class: "count" }, `${number(rows.length)} of it, mean ${short(mean)}`)),
    h("p", { class: "asked" }, inLine(rows[0].prompt || "its text is not kept", 300)),
    rows[0].label ? h("p", { class: "count" }, "label ", inLine(rows[0].label, 100)) : null,
    h("ul", {}, sorted.map((one) => h("li", {}, chip(one.reward, shade),
      h("button", { type: "button", class: "link", onclick: () => onOpen(one) }, inLine(one.answer || "(nothing)", 240)),
      one.fate && one.fate !== "trained" ? h("span", { class: "count" }, said(one.fate)) : null))));
}
