// What the page may change, where its server lets it: with the token that was printed when it started.

import { h, replace, said } from "./dom.js";
import { ofRun, post } from "./net.js";

// For as long as the page is open, and nowhere else.
const held = { allowed: false, token: "" };

export function allow(allowed) {
  held.allowed = allowed;
}

export const allowed = () => held.allowed;

// Where the token is given, and what came of the last action.
export function tokenBar() {
  if (!held.allowed) return null;
  const input = h("input", { type: "password", autocomplete: "off", value: held.token, oninput: (event) => { held.token = event.target.value.trim(); } });
  return h("div", { class: "filters" }, h("label", { class: "picker" }, h("span", {}, "Token of actions"), input),
    h("span", { class: "outcome", role: "status" }));
}

// A button that does something to a run; `ask`: what a person has to agree to first; `then`: called with what came of it.
export function act({ run, name, path, wish, ask = "", tell, then }) {
  const button = h("button", { type: "button", onclick: async () => {
    const outcome = document.querySelector(".outcome");
    if (ask && !window.confirm(ask)) return;
    button.disabled = true;
    try {
      const found = await post(ofRun(run, path), wish, held.token);
      replace(outcome, said(tell(found)));
      then();
    } catch (error) {
      replace(outcome, h("span", { class: "trouble" }, said(error.message)));
    } finally {
      button.disabled = false;
    }
  } }, name);
  return button;
}
