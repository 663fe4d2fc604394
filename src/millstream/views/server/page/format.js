// Values as people read them. All times are UTC.

const WHOLE = new Intl.NumberFormat("en");
const PLACES = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

export const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : WHOLE.format(value);
}

/** A number with its unit; a number in a text (a decimal, a large integer) keeps all its digits. */
export function measured(value, unit = "") {
  if (value === null || value === undefined) return NONE;
  if (unit === "percent") return `${(Number(value) * 100).toFixed(2)} %`;
  const text = typeof value === "string" ? grouped(value) : PLACES.format(value);
  return unit ? `${text} ${unit}` : text;
}

function grouped(text) {
  // A decimal has all the places of its column; zeros after the second place are left out.
  const [whole, places] = text.replace(/(\.\d\d\d*?)0+$/, "$1").split(".");
  const with_commas = whole.replace(/\B(?=(\d{3})+(?!\d))/g, ",");
  return places === undefined ? with_commas : `${with_commas}.${places}`;
}

export function axis(value, unit = "") {
  if (unit === "percent") return `${+(value * 100).toFixed(2)}%`;
  return SHORT.format(value);
}

const two = (number) => String(number).padStart(2, "0");

/** A time, to the second, and to the microsecond only where it has some. */
export function time(text) {
  if (!text) return NONE;
  const [day, rest] = text.replace("+00:00", "Z").replace("Z", "").split("T");
  return `${day} ${rest.replace(/\.0+$/, "")}`;
}

export function shortTime(text) {
  if (!text) return NONE;
  const at = new Date(text);
  const clock = `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}`;
  return `${at.getUTCDate()} ${MONTHS[at.getUTCMonth()]} ${clock}`;
}

export function tick(ms, span_ms) {
  const at = new Date(ms);
  if (span_ms > 2 * 86_400_000) return `${at.getUTCDate()} ${MONTHS[at.getUTCMonth()]}`;
  return `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} days`;
}

export function bytes(size) {
  if (size === null || size === undefined) return NONE;
  let unit = "B";
  for (const larger of ["KiB", "MiB", "GiB", "TiB"]) {
    if (size < 1024) break;
    size /= 1024;
    unit = larger;
  }
  return `${unit === "B" ? size : size.toFixed(1)} ${unit}`;
}

/** A value of a view's column, by its type. */
export function cell(value, type) {
  if (value === null || value === undefined) return NONE;
  if (type === "datetime") return time(value);
  if (type === "int") return typeof value === "number" ? WHOLE.format(value) : grouped(value);
  if (type === "float") return typeof value === "number" ? String(+value.toPrecision(6)) : value;
  if (type.startsWith("decimal")) return grouped(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export const isNumber = (type) => /^(int|float|decimal|duration)/.test(type ?? "");
