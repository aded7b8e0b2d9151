// Format numbers. Unknown values are a dash.

export const DASH = "–";

export function number(value, digits = 0) {
  if (typeof value !== "number" || !Number.isFinite(value)) return DASH;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// Three significant digits: 0.0123, 12.3, 1,234, 12.3 M.
export function short(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trimmed(value / 1e9)} G`;
  if (size >= 1e6) return `${trimmed(value / 1e6)} M`;
  if (size >= 1e4) return `${trimmed(value / 1e3)} k`;
  if (Number.isInteger(value)) return number(value);
  return size >= 1e-4 || size === 0 ? trimmed(value) : value.toExponential(1);
}

function trimmed(value) {
  return String(Number(value.toPrecision(3)));
}

export function share(value) {
  return typeof value === "number" && Number.isFinite(value) ? `${number(100 * value, 1)} %` : DASH;
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return DASH;
  const whole = Math.round(seconds);
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

// A rate per second or minute.
export function rate(value, what) {
  if (typeof value !== "number") return DASH;
  if (value === 0) return `no ${what}`;
  if (value >= 0.95) return `${short(value)} ${what}/s`;
  return `${short(value * 60)} ${what}/min`;
}

export function any(value) {
  if (value === null || value === undefined) return DASH;
  if (typeof value === "number") return short(value);
  if (Array.isArray(value)) return value.length ? value.map(any).join(", ") : "none";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
