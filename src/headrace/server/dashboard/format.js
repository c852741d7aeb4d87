// How numbers, times and payloads are written, here and in the terminal and the report:
// 1,234 · 12.3 k · 4.1 M; 850 ms · 12 s · 3 min · 2 h; rates in one unit per page.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const SECOND = 1000;
const MINUTE = 60 * SECOND;
const HOUR = 60 * MINUTE;
const DAY = 24 * HOUR;
export const NOTHING = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const short = (value) => (value < 100 ? value.toFixed(1).replace(/\.0$/, "") : whole.format(value));

export function count(value) {
  if (!known(value)) return NOTHING;
  if (Math.abs(value) < 9999.5) return whole.format(value);
  if (Math.abs(value) < 999_500) return `${short(value / 1e3)} k`;
  return value < 999.5e6 ? `${short(value / 1e6)} M` : `${short(value / 1e9)} G`;
}

/** The full number with separators, for sentences that must say exactly how many. */
export const exactCount = (value) => (known(value) ? whole.format(value) : NOTHING);

export const jobs = (n, kind = "") => `${exactCount(n)} ${kind && `${kind} `}${n === 1 ? "job" : "jobs"}`;
export const runAgain = (n, where = "") => `${jobs(n)}${where} ${n === 1 ? "runs" : "run"} again`;

export function duration(ms) {
  if (!known(ms)) return NOTHING;
  if (ms < 0.95) return "0 ms";
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 9950) return `${short(ms / SECOND)} s`;
  if (ms < 59.5 * SECOND) return `${Math.round(ms / SECOND)} s`;
  if (ms < 59.5 * MINUTE) return `${Math.round(ms / MINUTE)} min`;
  if (ms < 47.5 * HOUR)
    return `${short(Math.round((ms / HOUR) * (ms < 10 * HOUR ? 10 : 1)) / (ms < 10 * HOUR ? 10 : 1))} h`;
  return `${Math.round(ms / DAY)} d`;
}

export function age(time, now) {
  if (!known(time)) return NOTHING;
  const gone = now - time;
  if (Math.abs(gone) < 2 * SECOND) return "now";
  const whole = (ms) => duration(ms < MINUTE ? Math.round(ms / SECOND) * SECOND : ms);
  return gone >= 0 ? `${whole(gone)} ago` : `in ${whole(-gone)}`;
}

const exactly = new Intl.DateTimeFormat("en-GB", {
  year: "numeric",
  month: "short",
  day: "numeric",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  timeZoneName: "short",
});

// A job may be put off beyond the last moment that a calendar knows; formatting that would throw.
const LAST_MOMENT = 8.64e15;
const isMoment = (time) => known(time) && Math.abs(time) <= LAST_MOMENT;
export const exactTime = (time) => (isMoment(time) ? exactly.format(time) : "");
export const isoTime = (time) => (isMoment(time) ? new Date(time).toISOString() : null);

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const clockSeconds = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
export const clockTime = (time, withSeconds = false) =>
  isMoment(time) ? (withSeconds ? clockSeconds : clock).format(time) : NOTHING;

/** One unit for a whole page: per second when anything is fast, else per minute. */
export const rateUnit = (fastestPerSecond) => (fastestPerSecond >= 10 ? "s" : "min");

export function rate(perSecond, unit) {
  if (!known(perSecond)) return NOTHING;
  return `${rateNumber(perSecond, unit)}/${unit}`;
}

export function rateNumber(perSecond, unit) {
  if (!known(perSecond)) return NOTHING;
  const value = unit === "s" ? perSecond : perSecond * 60;
  return value > 0 && value < 9.95 ? value.toFixed(1).replace(/\.0$/, "") : count(value);
}

/** A payload in one line, without the braces. */
export function excerpt(data, length = 90) {
  if (data === null || data === undefined) return "";
  const text = typeof data === "object" && !Array.isArray(data) ? pairs(data) : JSON.stringify(data);
  return text.length > length ? `${text.slice(0, length - 1).replace(/[\uD800-\uDBFF]$/, "")}…` : text; // no half of an emoji
}

function pairs(data) {
  const shown = Object.entries(data)
    .filter(([key]) => !key.startsWith("__") && key !== "name")
    .slice(0, 8);
  return shown.map(([key, value]) => `${key}: ${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ");
}

export const firstLine = (text) => (text ?? "").split("\n", 1)[0];

// What differs between two failures of the same kind; the server groups by the same rules (commands/dashboard.py).
const VARYING = [
  [/\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b/gi, "<id>"],
  [/"[^"]*"|'[^']*'|`[^`]*`/g, "'...'"],
  [/\b0x[0-9a-f]+\b|\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{8,}\b/gi, "<id>"],
  [/\d+(?:[.,:]\d+)*/g, "#"],
];

/** What makes two errors the same one: the first line without the numbers, ids and quoted words in it. */
export function signature(error) {
  const line =
    firstLine((error ?? "").trim())
      .trim()
      .slice(0, 200) || "(no error text)";
  return VARYING.reduce((text, [pattern, standIn]) => text.replace(pattern, standIn), line);
}

/** The job's name as its clients know it. */
export const nameOf = (job) => job.name ?? (typeof job.data?.name === "string" ? job.data.name : "default");
