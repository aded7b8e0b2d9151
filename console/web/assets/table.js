// Tables: columns are [head, cell of a row, "number"?, meaning?, key to sort rows by?]; wide tables scroll.

import { h, replace, said } from "./dom.js";

export function table(name, columns, rows, onRow = null) {
  const body = h("tbody", {});
  const draw = (ordered) => replace(body, ordered.map((row) => line(columns, row, onRow)));
  const heads = columns.map(([head, , kind, meaning, key]) => {
    const sort = ({ currentTarget: { parentNode: th } }) => {
      const down = th.getAttribute("aria-sort") !== "descending";
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      th.setAttribute("aria-sort", down ? "descending" : "ascending");
      draw(rows.toSorted((a, b) => (down ? order(key(b), key(a)) : order(key(a), key(b)))));
    };
    return h("th", { scope: "col", class: kind, title: meaning }, key ? h("button", { type: "button", class: "link", onclick: sort }, head) : head);
  });
  draw(rows);
  return h("div", { class: "scroll", role: "region", "aria-label": name, tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
}

// Unknown values first, then numbers and texts by their kind.
function order(one, other) {
  if (typeof one === "number" && typeof other === "number") return one - other;
  return String(one ?? "").localeCompare(String(other ?? ""), "en", { numeric: true });
}

function line(columns, row, onRow) {
  return h("tr", {}, columns.map(([, cell, kind], at) => {
    const value = cell(row);
    const inside = value instanceof Node ? value : said(value);
    return h("td", { class: kind }, onRow && at === 0 ? h("button", { type: "button", class: "link", onclick: () => onRow(row) }, inside) : inside);
  }));
}
