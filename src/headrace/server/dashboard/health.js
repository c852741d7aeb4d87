// The judgement of the page: which queue is in trouble, how badly, and the one sentence that says so.
// Numbers in, words out; no drawing except the sentence itself.

import { h } from "./dom.js";
import { count, duration, exactCount, rate } from "./format.js";
import { now } from "./live.js";
import { queueLink } from "./parts.js";

const RECENT_MS = 60_000;
const LONG_WAIT_MS = 60_000;
const FEWEST_FAILURES = 3;

const newest = (values, step) =>
  values.slice(-Math.max(1, Math.round(RECENT_MS / step))).filter((v) => v !== null && v !== undefined);
const sum = (values) => values.reduce((total, v) => total + v, 0);

/** Average of the newest steps. */
export function recent(values, step) {
  const known = newest(values, step);
  return known.length ? sum(known) / known.length : 0;
}

// Not one job that fails now and then: as many as are completed, or more.
const isFailing = (own, step) => {
  const failed = sum(newest(own.failed, step));
  return Math.round((failed * step) / 1000) >= FEWEST_FAILURES && failed >= sum(newest(own.out, step));
};

/** A row of the queue table with its last hour and what is wrong with it, if anything. */
export function judge(row, hour) {
  const own = hour?.queues.get(row.name);
  // A minute is steadier than the seconds that the row knows, once there is one.
  const steady = own && own.in.length * hour.step >= RECENT_MS;
  const rates = steady
    ? { in: recent(own.in, hour.step), out: recent(own.out, hour.step) }
    : { in: row.in, out: row.out };
  const isLate = !row.paused && row.waiting > 0 && row.oldest > LONG_WAIT_MS;
  const trouble = row.paused
    ? row.waiting
      ? "paused"
      : null
    : own && isFailing(own, hour.step)
      ? "failing"
      : isLate && row.active === 0 && !rates.out
        ? "stuck"
        : isLate && rates.in > rates.out
          ? "behind"
          : isLate
            ? "late"
            : null;
  return {
    ...row,
    ...rates,
    failing: own ? recent(own.failed, hour.step) : 0,
    oldest: row.waiting ? row.oldest : null,
    isLate,
    trouble,
    depths: own?.waiting ?? [],
  };
}

const GRAVITY = { failing: 5, stuck: 4, behind: 3, late: 2, paused: 1 };

export const worstFirst = (a, b) =>
  (GRAVITY[b.trouble] ?? 0) - (GRAVITY[a.trouble] ?? 0) ||
  (b.oldest ?? 0) - (a.oldest ?? 0) ||
  b.failedToday - a.failedToday ||
  b.waiting - a.waiting ||
  a.name.localeCompare(b.name);

const SAY = {
  failing: (q, unit) => [
    queueLink(q.name),
    ` is failing: ${rate(q.failing, unit)} failed, ${rate(q.out, unit)} completed.`,
  ],
  stuck: (q) => [
    queueLink(q.name),
    ` is stuck: ${exactCount(q.waiting)} waiting, the oldest for ${duration(q.oldest)}, and no worker takes them.`,
  ],
  behind: (q, unit) => [
    queueLink(q.name),
    ` is falling behind: oldest job waits ${duration(q.oldest)}, ${rate(q.in, unit)} in, ${rate(q.out, unit)} out.`,
  ],
  late: (q, unit) => [
    queueLink(q.name),
    ` is late${q.out > q.in ? " but catching up" : ""}: oldest job waits ${duration(q.oldest)}, ${rate(q.in, unit)} in, ${rate(q.out, unit)} out.`,
  ],
  paused: (q) => [queueLink(q.name), ` is paused with ${exactCount(q.waiting)} waiting.`],
};

/** One sentence of state, and a second one for the rest. Before the last hour is known, nobody is reassured. */
export function sentence(queues, { storage, stats }, unit, hour) {
  if (storage && (storage.diskFull || storage.error)) {
    return say(
      "bad",
      "✕",
      `Nothing has been accepted for ${duration(Math.max(0, now() - storage.since))}. `,
      (storage.error ?? "The disk is full").replace(/\.?$/, "."),
    );
  }
  const troubled = queues.filter((queue) => queue.trouble).sort(worstFirst);
  if (!troubled.length && !hour) return say("paused", "…", h("span", { class: "quiet" }, summary(stats)));
  if (!troubled.length)
    return say("good", "✓", h("strong", {}, reassurance(queues)), " ", h("span", { class: "quiet" }, summary(stats)));
  const [worst, ...others] = troubled;
  const more =
    others.length > 0 &&
    h(
      "span",
      { class: "quiet" },
      ` ${others.length} more ${others.length === 1 ? "queue needs" : "queues need"} a look below.`,
    );
  return say(
    worst.trouble === "paused" ? "paused" : worst.trouble === "late" ? "warn" : "bad",
    worst.trouble === "paused" ? "‖" : "!",
    SAY[worst.trouble](worst, unit),
    more,
  );
}

// Not every backend knows how long jobs have waited.
const reassurance = (queues) =>
  queues.some((queue) => queue.waiting && !queue.paused && queue.oldest === null)
    ? "No queue is known to be late."
    : "All queues are keeping up.";

const summary = ({ waiting, active, delayed }) =>
  `${count(waiting)} waiting, ${count(active)} running, ${count(delayed)} delayed.`;

const say = (kind, glyph, ...words) =>
  h(
    "p",
    { class: `sentence ${kind}`, id: "state" },
    h("span", { class: "glyph", "aria-hidden": "true" }, glyph),
    h("span", {}, ...words),
  );
