// Tables: columns are [head, cell of a row, "number"?, meaning of the column?]; wide tables scroll.

import { h, said } from "./dom.js";

export function table(name, columns, rows, onRow = null) {
  const heads = columns.map(([head, , kind, meaning]) => h("th", { scope: "col", class: kind, title: meaning }, head));
  const body = rows.map((row) => h("tr", {}, columns.map(([, cell, kind], at) => {
    const value = cell(row);
    const inside = value instanceof Node ? value : said(value);
    const opens = onRow && at === 0;
    return h("td", { class: kind },
      opens ? h("button", { type: "button", class: "link", onclick: () => onRow(row) }, inside) : inside);
  })));
  return h("div", { class: "scroll", role: "region", "aria-label": name, tabindex: 0 },
    h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body)));
}
