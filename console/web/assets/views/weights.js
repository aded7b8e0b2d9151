// Publications of weights: how large, how long they took, how old, where they lie, and who has which; of a run that is
// over, what publishing took.

import { h, said, replace } from "../dom.js";
import { get, ofRun } from "../net.js";
import { any, bytes, duration, number } from "../words.js";
import { pages } from "../pages.js";
import { table } from "../table.js";

const NAMES = 3;
const SHOWN = 200;

export function weights({ run }) {
  const after = h("div", {});
  let took = new Map(), moved = "";
  const list = pages({
    run, noun: "weights", name: "Publications", sort: "-version",
    columns: [
      ["Publication", (one) => one.id], ["Model", (one) => one.model],
      ["Step", (one) => any(one.step), "number"], ["Published", (one) => `${duration(one.age_s)} ago`, "number"],
      ["Took", (one) => seconds(took.get(one.step) ?? one.write_s), "number"],
      ["Size", (one) => bytes(one.num_bytes), "number"], ["Way", (one) => one.transport || "folder"],
      ["Workers that have it", (one) => holders(one.workers)], ["Loading it", (one) => holders(one.loading)],
      ["Kept for", (one) => holders(one.pinned_by)], ["State", (one) => said(one.state, 200)],
      ["Folder", (one) => (one.folder === "here" ? said(one.path) : one.path ? "not seen from here" : "")],
    ],
  });

  async function load(live) {
    const { rows } = await get(ofRun(run, "published"));
    took = new Map(rows.map((one) => [one.step, one.took_s]));
    replace(after, !live && rows.length ? [h("h2", {}, "What publishing took"), table("Published", [
      ["After step", (one) => number(one.step), "number"], ["Took", (one) => seconds(one.took_s), "number"],
      ["When", (one) => (one.time_s ? new Date(1000 * one.time_s).toISOString().replace("T", " ").slice(0, 19) : "")],
    ], rows.slice(0, SHOWN))] : null);
  }

  return {
    node: h("section", {}, h("h1", {}, "Weights"), list.node, after),
    update(seen) {
      const now = `${seen.live} ${seen.moved}`;
      if (now !== moved) load(seen.live).catch(() => replace(after));
      moved = now;
      list.update(seen);
    },
    close() {},
  };
}

const seconds = (value) => (typeof value === "number" ? `${number(value, 2)} s` : any(value));

function holders(names) {
  if (!names?.length) return "";
  const rest = names.length - NAMES;
  return said(`${names.length}: ${names.slice(0, NAMES).join(", ")}${rest > 0 ? ` and ${rest} more` : ""}`);
}
