// All queues, and the table of them that the overview shares.

import * as api from "./api.js";
import { sparkline } from "./charts.js";
import { h } from "./dom.js";
import { count, duration, rateNumber, rateUnit, runAgain } from "./format.js";
import { judge, worstFirst } from "./health.js";
import { badge, firstJob, live, notice, paths, perform } from "./parts.js";

const HOUR_FRESH_MS = 15_000;
const MOST_LINES = 15;

export const title = () => "Queues";

export async function load(ctx) {
  const [rows, hour] = await Promise.all([api.queues(), hourOf()]);
  return { queues: rows.map((row) => judge(row, hour)).sort(worstFirst), hour };
}

// Shared by all pages: it is the largest answer, and it has something new once in a step of 20 s.
let hour = null;

/** The last hour of the busiest queues. */
export async function hourOf() {
  if (!hour || Date.now() - hour.at > HOUR_FRESH_MS)
    hour = { at: Date.now(), data: await api.history("1h", { top: MOST_LINES }) };
  return hour.data;
}

const unitOf = (queues) =>
  rateUnit(Math.max(0, ...queues.map((queue) => Math.max(queue.in ?? 0, queue.out ?? 0))));

export function view({ queues }, ctx) {
  const wanted = (ctx.ui.filter ?? "").toLowerCase();
  const shown = queues.filter((queue) => queue.name.toLowerCase().includes(wanted));
  return [
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Queues"),
      queues.length > 0 &&
        h("input", {
          type: "search",
          placeholder: "Filter by name",
          "aria-label": "Filter queues by name",
          value: ctx.ui.filter ?? "",
          oninput: (event) => {
            ctx.ui.filter = event.currentTarget.value;
            ctx.redraw();
          },
        }),
    ),
    !queues.length
      ? noQueues()
      : shown.length
        ? queueTable(shown, ctx, unitOf(queues))
        : notice("No queue has that in its name"),
  ];
}

export const noQueues = () =>
  notice("No queues yet", h("p", {}, "A queue is created by its first job:"), firstJob("mail"));

export function queueTable(queues, ctx, unit) {
  return h(
    "table",
    { class: "queues cards" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", {}, "Queue"),
        h("th", { class: "n" }, "Waiting, last hour"),
        h("th", { class: "n" }, "Oldest"),
        h("th", { class: "n" }, `In/${unit}`),
        h("th", { class: "n" }, `Out/${unit}`),
        h("th", { class: "n" }, "p95 wait"),
        h("th", { class: "n" }, "Running"),
        h("th", { class: "n", title: "Since midnight UTC, or since the server started" }, "Failed today"),
        h("th", { class: "act" }, h("span", { class: "hidden" }, "Actions")),
      ),
    ),
    h(
      "tbody",
      {},
      queues.map((queue) => row(queue, ctx, unit)),
    ),
  );
}

function row(queue, ctx, unit) {
  const open = (event) => {
    if (!event.target.closest("a, button")) location.hash = paths.queue(queue.name);
  };
  return h(
    "tr",
    { key: queue.name, "data-row": true, class: `opens ${queue.trouble ?? ""}`, onclick: open },
    h(
      "td",
      { class: "main" },
      h("a", { class: "name", href: paths.queue(queue.name), "data-open": true, title: queue.name }, queue.name),
      queue.paused && h("span", { class: "mark-paused" }, badge("paused")),
      queue.trouble && queue.trouble !== "paused" && h("span", { class: `tag ${queue.trouble === "failing" ? "bad" : "warn"}` }, `! ${WORDS[queue.trouble]}`),
    ),
    h(
      "td",
      { class: "n", "data-label": "Waiting" },
      sparkline(queue.depths),
      h("span", { class: "figure" }, live(queue.waiting)),
    ),
    h(
      "td",
      { class: `n${queue.isLate ? " warn" : ""}`, "data-label": "Oldest" },
      live(queue.oldest, duration),
    ),
    h(
      "td",
      { class: "n", "data-label": `In/${unit}` },
      live(queue.in, (v) => rateNumber(v, unit)),
    ),
    h(
      "td",
      { class: "n", "data-label": `Out/${unit}` },
      live(queue.out, (v) => rateNumber(v, unit)),
    ),
    h("td", { class: "n", "data-label": "p95 wait" }, live(queue.p95, duration)),
    h(
      "td",
      { class: "n", "data-label": "Running" },
      live(queue.active),
      queue.limit !== null && h("span", { class: "quiet" }, `/${count(queue.limit)}`),
    ),
    h(
      "td",
      { class: `n${queue.failedToday ? " bad" : ""}`, "data-label": "Failed today" },
      queue.failedToday ? h("a", { href: paths.queue(queue.name, { state: "failed" }) }, live(queue.failedToday)) : "0",
    ),
    h(
      "td",
      { class: "act" },
      queue.failed > 0 &&
        h(
          "button",
          {
            type: "button",
            class: "small",
            "data-retry": true,
            onclick: () => retryAll(queue, ctx),
            title: `Retry all failed jobs of ${queue.name}`,
          },
          `Retry ${count(queue.failed)}`,
        ),
      pauseButton(queue, ctx),
    ),
  );
}

const WORDS = { failing: "failing", stuck: "stuck", behind: "falling behind", late: "late" };

export function pauseButton(queue, ctx) {
  const [act, word, told] = queue.paused ? [api.resume, "Resume", "runs again"] : [api.pause, "Pause", "is paused"];
  const onclick = async () => {
    await perform(() => act(queue.name), `${queue.name} ${told}`);
    ctx.reload();
  };
  return h("button", { type: "button", class: "small", onclick }, word);
}

async function retryAll(queue, ctx) {
  await perform(
    () => api.retryFailed(queue.name),
    (n) => runAgain(n, ` of ${queue.name}`),
  );
  ctx.ui.failures = null;
  ctx.reload();
}
