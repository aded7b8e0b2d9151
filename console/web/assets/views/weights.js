// Publications of weights: size, age, folder, and the workers that have or load each; and how long publishing took.

import { h, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { any, number } from "../words.js";
import { pages } from "../pages.js";
import { table } from "../table.js";

const SHOWN = 200;

export function weights({ run }) {
  const after = h("div", {});
  let moved = "";
  const list = pages({ run, noun: "weights", name: "Publications", sort: "-version" });

  async function load() {
    const { rows } = await get(ofRun(run, "published"));
    replace(after, rows.length ? [h("h2", {}, "What publishing took"), table("Published", [
      ["After step", (one) => number(one.step), "number"], ["Took", (one) => seconds(one.took_s), "number"],
      ["When", (one) => (one.time_s ? new Date(1000 * one.time_s).toISOString().replace("T", " ").slice(0, 19) : "")],
    ], rows.slice(0, SHOWN))] : null);
  }

  return {
    node: h("section", {}, h("h1", {}, "Weights"), list.node, after),
    update(seen) {
      const now = String(seen.moved);
      if (now !== moved) load().catch(() => replace(after));
      moved = now;
      list.update(seen);
    },
    close() {},
  };
}

const seconds = (value) => (typeof value === "number" ? `${number(value, 2)} s` : any(value));
