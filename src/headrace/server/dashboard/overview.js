// The first screen: is anything wrong, where, since when. Sorted by trouble, no click needed.

import * as api from "./api.js";
import { chart, roundUp, roundUpTime } from "./charts.js";
import { h } from "./dom.js";
import { groupTable, latestFailures } from "./failures.js";
import { clockTime, count, duration, rate, rateNumber, rateUnit } from "./format.js";
import { judge, recent, sentence, worstFirst } from "./health.js";
import { fresh, link, section } from "./parts.js";
import { hourOf, noQueues, queueTable } from "./queues.js";

const WINDOWS = [
  ["15m", "15 min"],
  ["1h", "1 h"],
  ["24h", "24 h"],
];
const MOST_QUEUES = 12;

const NOT_YET = { start: 0, step: 1, series: { in: [], out: [], failed: [], waitP50: [], waitP95: [] } };

export const title = () => "Overview";

export async function load(ctx) {
  const span = ctx.query.window ?? WINDOWS[0][0];
  if (!ctx.data) return firstLook(span, ctx);
  const [server, hour, times] = await Promise.all([api.overview(), hourOf(), windowOf(ctx, span)]);
  const failures = await latestFailures(ctx, server.stats.dlq);
  return { queues: server.queues.map((row) => judge(row, hour)).sort(worstFirst), server, hour, times, failures, span };
}

// The sentence and the table need one small answer; lines and failures follow.
async function firstLook(span, ctx) {
  const server = await api.overview();
  ctx.reload();
  return {
    queues: server.queues.map((row) => judge(row, null)).sort(worstFirst),
    server,
    hour: null,
    times: NOT_YET,
    failures: null,
    span,
  };
}

const windowOf = (ctx, span) => fresh(ctx.ui, "window", 4500, span, () => api.history(span));

export function view(data, ctx) {
  const { queues, server, failures } = data;
  if (!queues.length) return [h("h1", { class: "hidden" }, "Overview"), noQueues()];
  const { series } = data.times;
  const unit = rateUnit(Math.max(0, ...series.in, ...series.out));
  return [
    h("h1", { class: "hidden" }, "Overview"),
    sentence(queues, server, unit, data.hour),
    charts(data, ctx, unit),
    section(
      "Queues",
      server.totalQueues > MOST_QUEUES && link("#/queues", `all ${count(server.totalQueues)} queues`),
      queueTable(queues.slice(0, MOST_QUEUES), ctx, unit),
    ),
    section(
      "Latest failures",
      failures?.length > 0 && link("#/failures", "all failures"),
      failures === null
        ? h("p", { class: "quiet" }, "Loading…")
        : failures.length
          ? groupTable(failures, ctx)
          : h("p", { class: "quiet" }, "Nothing has failed."),
    ),
  ];
}

function charts(data, ctx, unit) {
  const { series, start, step } = data.times;
  const perUnit = (values) => values.map((v) => (v === null ? null : unit === "s" ? v : v * 60));
  const pointed = ctx.ui.pointed ?? null;
  const narrow = ctx.width < 760;
  const width = Math.floor(narrow ? ctx.width : (ctx.width - 48) / 3);
  const axis = {
    start,
    step,
    width,
    pointed,
    onpoint: (index) => {
      ctx.ui.pointed = index;
      ctx.redraw();
    },
  };
  const at = (values, total) => (pointed !== null && pointed < values.length ? values[pointed] : total(values));
  const mean = (values) => recent(values, step);
  const lastKnown = (values) => values.findLast((v) => v !== null && v !== undefined) ?? null;
  const number = (v) => rateNumber(unit === "s" ? v : v / 60, unit);
  const figures = [
    figure(
      "flow",
      "Jobs in and out",
      [
        ["in", "came", rate(at(series.in, mean), unit)],
        ["out", "completed", rate(at(series.out, mean), unit)],
      ],
      {
        ...axis,
        label: "Jobs in and out over time",
        lines: [
          { values: perUnit(series.in), class: "came", area: true },
          { values: perUnit(series.out), class: "completed" },
        ],
        format: number,
        top: roundUp,
      },
    ),
    figure(
      "wait",
      "Time waited",
      [
        ["p50", "waiting thin", duration(at(series.waitP50, lastKnown))],
        ["p95", "waiting", duration(at(series.waitP95, lastKnown))],
      ],
      {
        ...axis,
        label: "Wait time over time",
        lines: [
          { values: series.waitP50, class: "waiting thin", area: true },
          { values: series.waitP95, class: "waiting" },
        ],
        format: duration,
        top: roundUpTime,
      },
    ),
    figure("failures", "Failures", [["failed", "failed", rate(at(series.failed, mean), unit)]], {
      ...axis,
      label: "Failures over time",
      lines: [{ values: perUnit(series.failed), class: "failed", bars: true }],
      format: number,
      top: roundUp,
    }),
  ];
  const chosen = ctx.ui.chart ?? "flow";
  return h(
    "section",
    { class: "charts" },
    h(
      "div",
      { class: "head" },
      narrow &&
        choice(
          "Chart",
          [
            ["flow", "In and out"],
            ["wait", "Wait"],
            ["failures", "Failures"],
          ],
          chosen,
          (name) => {
            ctx.ui.chart = name;
            ctx.redraw();
          },
        ),
      h("span", { class: "quiet moment" }, pointed === null ? "" : clockTime(start + pointed * step, true)),
      choice("Time shown", WINDOWS, data.span, (span) => ctx.go({ window: span === WINDOWS[0][0] ? "" : span })),
    ),
    h("div", { class: "row" }, narrow ? figures.filter((figure) => figure.key === chosen) : figures),
  );
}

function figure(key, name, legend, options) {
  return h(
    "figure",
    { key },
    h(
      "figcaption",
      {},
      h("span", { class: "what" }, name),
      legend.map(([word, kind, value]) =>
        h(
          "span",
          { class: "legend" },
          h("i", { class: `swatch ${kind}` }),
          `${word} `,
          h("b", { "data-live": true }, value),
        ),
      ),
    ),
    chart(options),
  );
}

/** A row of exclusive choices. */
const choice = (label, options, chosen, choose) =>
  h(
    "div",
    { class: "choice", role: "group", "aria-label": label },
    options.map(([value, word]) =>
      h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => choose(value) }, word),
    ),
  );
