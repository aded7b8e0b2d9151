// A paged list: columns, filters and order as on the command line.

import { h, loading, said, replace } from "./dom.js";
import { get, ofRun } from "./net.js";
import { number } from "./words.js";
import { table } from "./table.js";

const EVERY_MS = 2500;

// The server declares the columns and formats their cells (console/resources.py). filters: [{ name, field, values? }]: one
// of the values, or a substring of the field; acts: the cell of a further column with actions on a row.
export function pages({ run, noun, name, filters = [], sort = "", limit = 50, onRow = null, acts = null }) {
  const body = h("div", {}, loading()), count = h("span", { class: "count", role: "status" });
  const more = h("button", { type: "button", class: "more", hidden: true, onclick: () => load(true) }, "More");
  const inputs = filters.map((filter) => input(filter, () => load(false)));
  const bar = h("div", { class: "filters" }, inputs.map(([label]) => label), count);
  let rows = [], columns = [], next = null, asked = 0, read = 0, live = false;

  async function load(further) {
    if (!live) return;
    const mine = ++asked;
    read = Date.now();
    const where = inputs.map(([, value]) => value()).filter(Boolean);
    try {
      const found = await get(ofRun(run, `lists/${noun}`), { where, sort, limit, after: further ? next : "" });
      if (mine !== asked) return;
      const read_ = found.rows.map((row, at) => ({ ...row, cells: found.cells[at] }));
      rows = further ? [...rows, ...read_] : read_;
      columns = found.columns.map(({ name, title, kind, meaning }) => [title, ({ cells }) => cell(kind, cells[name]), kind === "number" ? kind : "", meaning]);
      if (acts) columns.push(["", acts]);
      next = found.next;
      replace(count, `${number(found.total)} ${name.toLowerCase()}`);
      draw();
    } catch (error) {
      if (mine !== asked) return;
      silence(error.message);
    }
  }

  function draw() {
    more.hidden = !next;
    const before = body.querySelector(".scroll")?.scrollLeft ?? 0;
    replace(body, rows.length ? table(name, columns, rows, onRow) : h("p", { class: "none" }, "None."));
    if (before) body.querySelector(".scroll")?.scrollTo(before, 0);
  }

  const node = h("div", { class: "pages" }, bar, body, more);
  // Refresh only while it shows its first page, and has neither focus nor a selection.
  const marked = () => !getSelection().isCollapsed && node.contains(getSelection().anchorNode);
  const idle = () => rows.length <= limit && !marked() && !node.contains(document.activeElement);

  // A run whose Redis does not answer has no lists.
  function update(seen) {
    live = seen.live;
    if (!live) { silence(seen.silent); return; }
    if (Date.now() - read < EVERY_MS || !idle()) return;
    load(false);
  }

  function silence(sentence) {
    rows = [];
    more.hidden = true;
    replace(count);
    replace(body, h("p", { class: "none" }, said(sentence)));
  }

  return { node, update, anew: () => load(false) };
}

function cell(kind, text) {
  return kind === "state" ? h("span", { class: `badge is-${text === "serving" ? "well" : "waits"}` }, said(text || "unknown")) : said(text, 200);
}

function input({ name, field, values }, onChange) {
  const node = values
    ? h("select", { onchange: onChange }, ["", ...values].map((value) => h("option", { value }, value || "all")))
    : h("input", { type: "search", oninput: later(onChange) });
  const value = () => node.value && `${field}${values ? "=" : "~"}${node.value}`;
  return [h("label", { class: "picker" }, h("span", {}, name), node), value];
}

function later(act) {
  let timer = 0;
  return () => { clearTimeout(timer); timer = setTimeout(act, 200); };
}
