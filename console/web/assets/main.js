// The page shows a run, optionally compared with another, in one of several views; the address holds its state.

import { allow } from "./acts.js";
import { failure, h, said, replace } from "./dom.js";
import { follow, get } from "./net.js";
import { address, place } from "./place.js";
import { duration } from "./words.js";
import { overview } from "./views/overview.js";
import { curves } from "./views/curves.js";
import { queue } from "./views/queue.js";
import { samples } from "./views/samples.js";
import { evals } from "./views/evals.js";
import { fleet } from "./views/fleet.js";
import { trace } from "./views/trace.js";
import { weights } from "./views/weights.js";
import { settings } from "./views/settings.js";
import { runs } from "./views/runs.js";

const VIEWS = {
  overview: ["Overview", overview],
  curves: ["Curves", curves],
  queue: ["Queue", queue],
  samples: ["Samples", samples],
  evals: ["Evaluation", evals],
  trace: ["Trace", trace],
  fleet: ["Fleet", fleet],
  weights: ["Weights", weights],
  settings: ["Configuration", settings],
};

const top_ = document.getElementById("top");
const content = document.getElementById("content");
let shown = { close() {} };
let stop = () => {};
let known = [];

async function show() {
  stop();
  shown.close();
  shown = { close() {} };
  const here = place(VIEWS);
  try {
    const found = await get("/runs");
    known = found.runs;
    allow(found.acts);
  } catch (error) {
    replace(content, failure(error));
    return;
  }
  if (!here.run && known.length === 1) { location.replace(address({ ...here, run: known[0].run })); return; }
  document.title = here.run ? `${here.run} · penstock` : "penstock";
  head(here);
  if (!here.run) { shown = runs(known); replace(content, shown.node); return; }
  if (!known.some((one) => one.run === here.run)) {
    replace(content, failure(new Error(`There is no run ${here.run} in this folder.`)), h("a", { href: "#/" }, "All runs"));
    return;
  }
  open_(here);
}

function open_(here) {
  shown = VIEWS[here.view][1](here);
  replace(content, shown.node);
  stop = follow(here.run, (seen) => { badge(seen); shown.update?.(seen); }, () => badge(null));
}

function head(here) {
  replace(top_,
    h("div", { class: "bar" },
      h("a", { class: "brand", href: "#/" }, "penstock"),
      here.run && picker("Run", known.map((one) => one.run), here.run, (run) => go({ ...here, run, other: "" })),
      here.run && picker("Beside", ["", ...known.map((one) => one.run).filter((run) => run !== here.run)], here.other,
        (other) => go({ ...here, other })),
      h("span", { id: "badge", class: "badge", role: "status" }),
      h("button", { class: "theme", type: "button", onclick: () => window.switchTheme(), "aria-label": "Switch between dark and light" }, "◐")),
    here.run && h("nav", { "aria-label": "Views" }, Object.entries(VIEWS).map(([view, [name]]) =>
      h("a", { href: address({ ...here, view, asked: {} }), "aria-current": view === here.view ? "page" : undefined }, name))));
}

function picker(name, values, chosen, onChoice) {
  const held = values.includes(chosen) ? values : [chosen, ...values];
  const options = held.map((value) => h("option", { value, selected: value === chosen }, value || "nothing"));
  return h("label", { class: "picker" }, h("span", {}, name),
    h("select", { onchange: (event) => onChoice(event.target.value) }, options));
}

function go(to) {
  location.hash = address(to);
}

const STATES = { finished: "well", running: "well", stopped: "waits", failed: "gone", killed: "gone" };

function badge(seen) {
  const node = document.getElementById("badge");
  if (!node) return;
  if (!seen) { node.className = "badge is-gone"; replace(node, "the page's server is silent"); return; }
  const state = seen.live && (!seen.state || seen.state === "running") ? "live" : seen.state || "no Redis";
  node.className = `badge is-${state === "live" ? "well" : STATES[seen.state] ?? "waits"}`;
  const time = seen.active_s && state !== "live" ? ` after ${duration(seen.active_s)}` : "";
  replace(node, h("span", {}, `${state}${time}`), seen.reason && h("span", { class: "reason" }, said(seen.reason, 160)));
}

addEventListener("hashchange", show);
show();
