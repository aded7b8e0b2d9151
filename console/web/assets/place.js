// Where the page stands: #/RUN/VIEW?with=OTHER.

export function place(views) {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run = "", view = ""] = path.split("/").map(decoded);
  return { run, view: Object.hasOwn(views, view) ? view : "overview", other: new URLSearchParams(query).get("with") ?? "" };
}

export function address({ run, view, other }) {
  return `#/${encodeURIComponent(run)}/${view}${other ? `?with=${encodeURIComponent(other)}` : ""}`;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
