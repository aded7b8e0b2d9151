// Requests to the server. Every failure is an Error whose message is a sentence.

export async function get(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of [value].flat()) if (one !== undefined && one !== null && one !== "") query.append(name, one);
  }
  const text = query.toString();
  return answered(() => fetch(`/api${path}${text ? `?${text}` : ""}`, { headers: { accept: "application/json" } }));
}

export async function post(path, body, token) {
  const headers = { "content-type": "application/json", "x-penstock-token": token };
  return answered(() => fetch(`/api${path}`, { method: "POST", headers, body: JSON.stringify(body) }));
}

async function answered(ask) {
  let answer;
  try {
    answer = await ask();
  } catch {
    throw new Error("The page's server does not answer: is `penstock web` still running?");
  }
  const value = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(value.error ?? `The server answered with status ${answer.status}.`);
  return value;
}

export const ofRun = (run, rest) => `/runs/${encodeURIComponent(run)}/${rest}`;

// Follows a run while the page is visible: browsers limit connections, and a hidden page needs none.
export function follow(run, onOverview, onSilence) {
  let source = null;
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource(`/api${ofRun(run, "events")}`);
    source.addEventListener("overview", (event) => onOverview(JSON.parse(event.data)));
    source.onerror = () => onSilence();
  };
  const close = () => { source?.close(); source = null; };
  const turn = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", turn);
  open();
  return () => { document.removeEventListener("visibilitychange", turn); close(); };
}
