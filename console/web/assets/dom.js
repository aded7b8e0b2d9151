// Create elements. All text is inserted as text nodes: answers, names and reasons are untrusted.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false)
    .map((one) => (one instanceof Node ? one : document.createTextNode(String(one)))));
  return node;
}

// Invisible characters with effects: controls, direction marks, lone surrogates; script joiners and line ends are kept.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/u;
const KEPT = new Set(["\n", "\t", "\u200c", "\u200d"]);

// Untrusted text: isolated from the text direction around it, hidden characters shown as escapes.
export function said(text, most = Infinity) {
  const all = String(text);
  const shown = all.length > most ? `${all.slice(0, most)} …` : all;
  const node = h("bdi", { class: "said", title: shown === all ? undefined : visible(all.slice(0, 2000)) });
  let plain = "";
  const flush = () => { if (plain) node.append(plain); plain = ""; };
  for (const char of shown) {
    if (KEPT.has(char) || !HIDDEN.test(char)) { plain += char; continue; }
    flush();
    node.append(h("span", { class: "hidden-char" }, numbered(char)));
  }
  flush();
  return node;
}

export function visible(text) {
  return Array.from(String(text), (char) => (KEPT.has(char) || !HIDDEN.test(char) ? char : numbered(char))).join("");
}

function numbered(char) {
  return `\\u${char.codePointAt(0).toString(16).padStart(4, "0")}`;
}

export function replace(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter(Boolean));
}

export function loading() {
  return h("p", { class: "none", role: "status" }, "Loading …");
}

export function failure(error) {
  return h("p", { class: "failure", role: "alert" }, said(error.message));
}
