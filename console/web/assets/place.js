// State of the page in its address: #/RUN/VIEW?with=OTHER, and the parameters of the view.

export function place(views) {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run = "", view = ""] = path.split("/").map(decoded);
  const { with: other = "", ...asked } = Object.fromEntries(new URLSearchParams(query));
  return { run, view: Object.hasOwn(views, view) ? view : "overview", other, asked };
}

export function address({ run, view, other, asked = {} }) {
  const query = new URLSearchParams({ ...asked, ...(other ? { with: other } : {}) }).toString();
  return `#/${encodeURIComponent(run)}/${view}${query ? `?${query}` : ""}`;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
