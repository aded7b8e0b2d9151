// Actions of the page on a run, if its server allows them; they need the token printed at its start.

import { h, replace, said } from "./dom.js";
import { ofRun, post } from "./net.js";

// Kept only while the page is open.
const held = { allowed: false, token: "" };

export function allow(allowed) {
  held.allowed = allowed;
}

export const allowed = () => held.allowed;

// Input of the token, and the result of the last action.
export function tokenBar() {
  if (!held.allowed) return null;
  const input = h("input", { type: "password", autocomplete: "off", value: held.token, oninput: (event) => { held.token = event.target.value.trim(); } });
  return h("div", { class: "filters" }, h("label", { class: "picker" }, h("span", {}, "Token of actions"), input),
    h("span", { class: "outcome", role: "status" }));
}

// A button that runs an action; `ask`: question to confirm first; `tell`: text of the result; `then`: called afterwards.
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
