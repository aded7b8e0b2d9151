// The generated tokens of a sample, coloured by logprob, version, or loss.

import { h, replace, visible } from "./dom.js";
import { number } from "./words.js";

const BY = { logprob: "Logprob", version: "Version", loss: "Loss" };
//: Logprobs at which the next shade begins: sure, likely, open, unlikely.
const SHADES = [-0.1, -0.7, -2.3];

export function tokens({ drawn, num_left: left }) {
  if (!drawn.length) return h("p", { class: "none" }, "Its tokens are not kept.");
  const boxes = h("div", { class: "tokens" }), key = h("p", { class: "count" });
  const buttons = Object.entries(BY).map(([by, name]) =>
    h("button", { type: "button", "aria-pressed": "false", onclick: () => show(by) }, name));

  function show(by) {
    buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(Object.keys(BY)[at] === by)));
    const versions = [...new Set(drawn.map((one) => one.version))].sort((a, b) => a - b);
    replace(key, keyOf(by, versions));
    replace(boxes, drawn.map((one) => h("span", { class: `token ${shade(by, one, versions)}`, title: describe(one) }, wordOf(one))));
  }

  show("logprob");
  return h("div", {}, h("div", { class: "headed" }, h("h3", {}, `Generated tokens, ${number(drawn.length + left)}`),
    h("div", { class: "choice", role: "group", "aria-label": "Colour tokens by" }, buttons)), key, boxes,
  left ? h("p", { class: "count" }, `${number(left)} more are not shown; \`penstock export\` has all.`) : null);
}

function shade(by, { logprob, version, loss }, versions) {
  if (by === "loss") return loss ? "t0" : "t3";
  if (by === "version") return `v${versions.indexOf(version) % 6}`;
  return `t${SHADES.filter((edge) => logprob < edge).length}`;
}

function keyOf(by, versions) {
  const sample = (style, text) => [h("span", { class: `token ${style}` }, text), " "];
  if (by === "loss") return [sample("t0", "bears loss"), sample("t3", "masked")];
  if (by === "version") return versions.map((one, at) => sample(`v${at % 6}`, `version ${one}`));
  return [sample("t0", "p > 0.9"), sample("t1", "> 0.5"), sample("t2", "> 0.1"), sample("t3", "less")];
}

// Text of a token with visible signs for white space; its id if there is no tokenizer.
function wordOf({ token, text }) {
  if (text === null || text === undefined) return token;
  return visible(text).replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

const describe = ({ at, token, logprob, version, loss }) =>
  `place ${at}, token ${token}, logprob ${number(logprob, 4)}, version ${version}, ${loss ? "bears loss" : "masked"}`;
