// Set the chosen theme, or the system's, before the first paint.
(() => {
  const KEY = "penstock-theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const apply = () => {
    const theme = chosen() ?? (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    return theme;
  };
  window.switchTheme = () => {
    const next = apply() === "dark" ? "light" : "dark";
    try { localStorage.setItem(KEY, next); } catch { /* private window: this page only */ }
    document.documentElement.dataset.theme = next;
    return next;
  };
  dark.addEventListener("change", apply);
  apply();
})();
