// One queue: its jobs by state, how it has been doing, and what one may do to it.

import * as api from "./api.js";
import { chart, roundUp, roundUpCount } from "./charts.js";
import { h } from "./dom.js";
import { retryButton } from "./failures.js";
import { NOTHING, count, duration, exactCount, jobs, nameOf, rate, rateNumber, rateUnit, runAgain } from "./format.js";
import { judge } from "./health.js";
import { STATES, attempted, badge, confirm, dialog, factList, firstJob, fresh, jobTable, live, notice, paths, perform, typed } from "./parts.js";
import { pauseButton } from "./queues.js";

const PAGE = 25;
const SEARCH_FRESH_MS = 10_000;
const HOUR_FRESH_MS = 5000;
const TABS = ["waiting", "active", "delayed", "waiting-children", "completed", "failed"];

export const title = (ctx) => ctx.id;

export async function load(ctx) {
  const { state = "", page = "0", find = "" } = ctx.query;
  const [rows, hour, found, detail] = await Promise.all([
    api.queues(),
    hourOf(ctx),
    find ? searched(ctx) : api.jobs(ctx.id, { state, limit: PAGE, offset: Number(page) * PAGE, asc: false }),
    api.queue(ctx.id),
  ]);
  const row = rows.find((queue) => queue.name === ctx.id);
  return {
    queue: row && judge(row, hour),
    counts: detail.counts,
    hour,
    list: find ? found.jobs : found,
    searched: find ? found : null,
    page: Number(page),
    state,
    find,
  };
}

// A search may look at very many jobs: it is not repeated with every change.
function searched(ctx) {
  const { state = "", find, before = "" } = ctx.query;
  const search = () => api.search(ctx.id, { text: find, state, limit: PAGE, cursor: before });
  return fresh(ctx.ui, "found", SEARCH_FRESH_MS, JSON.stringify([state, find, before]), search);
}

/** The last hour of this queue alone, in the shape that all queues together have. */
const hourOf = (ctx) =>
  fresh(ctx.ui, "hour", HOUR_FRESH_MS, ctx.id, async () => {
    const { start, step, series } = await api.history("1h", { queue: ctx.id });
    return { start, step, queues: new Map([[ctx.id, series]]) };
  });

export function view(data, ctx) {
  const { queue, counts } = data;
  if (!queue) {
    return [
      heading(ctx.id),
      notice("This queue is empty", h("p", {}, "It is created by its first job:"), firstJob(ctx.id)),
    ];
  }
  return [
    heading(ctx.id, queue.paused && badge("paused"), actions(queue, counts, ctx)),
    figures(data, ctx),
    h(
      "div",
      { class: "head tabs" },
      h(
        "nav",
        { "aria-label": "Jobs by state" },
        tab(ctx, "", "all", total(counts)),
        TABS.filter((state) => state !== "waiting-children" || counts[state]).map((state) =>
          tab(ctx, state, STATES[state].word, counts[state]),
        ),
      ),
      h("input", {
        type: "search",
        placeholder: "Search name, data, id, error",
        "aria-label": "Search the jobs of this queue",
        value: data.find,
        oninput: (event) => typed(ctx, { find: event.currentTarget.value.trim(), page: "", before: "" }),
      }),
    ),
    listed(data, ctx),
  ];
}

const total = (counts) => TABS.reduce((sum, state) => sum + (counts[state] ?? 0), 0);

const heading = (name, ...more) =>
  h("div", { class: "head" }, h("h1", {}, name, " ", more[0]), h("div", { class: "actions" }, more[1]));

const tab = (ctx, state, word, n) =>
  h(
    "a",
    {
      href: paths.queue(ctx.id, { state, find: ctx.query.find }),
      "aria-current": (ctx.query.state ?? "") === state ? "page" : null,
      class: n ? null : "quiet",
    },
    word,
    " ",
    live(n),
  );

// -- figures -------------------------------------------------------------------------------------------------------

function figures({ queue, hour }, ctx) {
  const own = hour.queues.get(queue.name);
  const unit = rateUnit(Math.max(queue.in ?? 0, queue.out ?? 0));
  const facts = [
    ["waiting", live(queue.waiting)],
    ["oldest waits", live(queue.oldest, duration)],
    ["running", [live(queue.active), queue.limit !== null && `/${count(queue.limit)}`]],
    ["in", live(queue.in, (v) => rate(v, unit))],
    ["out", live(queue.out, (v) => rate(v, unit))],
    ["p95 wait", live(queue.p95, duration)],
  ];
  const wide = ctx.width >= 760;
  const width = Math.floor(wide ? (ctx.width - 24) / 2 : ctx.width);
  const axis = {
    start: hour.start,
    step: hour.step,
    width,
    // The server keeps no figures of a queue in which nothing happens.
    empty: queue.in || queue.out ? undefined : "No job has come or gone in the last hour.",
    pointed: ctx.ui.pointed ?? null,
    onpoint: (index) => {
      ctx.ui.pointed = index;
      ctx.redraw();
    },
  };
  const perUnit = (values) => values.map((v) => (unit === "s" ? v : v * 60));
  const at = (values) => (axis.pointed === null ? null : values[axis.pointed]);
  return [
    factList(facts),
    own &&
      h(
        "div",
        { class: "row charts" },
        h(
          "figure",
          { key: "depth" },
          caption("Waiting", [["waiting", "waiting", count(at(own.waiting))]]),
          chart({
            ...axis,
            label: "Waiting jobs, last hour",
            lines: [{ values: own.waiting, class: "waiting", area: true }],
            format: count,
            top: roundUpCount,
          }),
        ),
        wide &&
          h(
            "figure",
            { key: "flow" },
            caption("Jobs in and out", [
              ["in", "came", rate(at(own.in), unit)],
              ["out", "completed", rate(at(own.out), unit)],
            ]),
            chart({
              ...axis,
              label: "Jobs in and out, last hour",
              lines: [
                { values: perUnit(own.in), class: "came", area: true },
                { values: perUnit(own.out), class: "completed" },
              ],
              format: (v) => rateNumber(unit === "s" ? v : v / 60, unit),
              top: roundUp,
            }),
          ),
      ),
  ];
}

const caption = (name, legend) =>
  h(
    "figcaption",
    {},
    h("span", { class: "what" }, name),
    h("span", { class: "quiet" }, "last hour"),
    legend.map(([word, kind, value]) =>
      h(
        "span",
        { class: "legend" },
        h("i", { class: `swatch ${kind}` }),
        `${word} `,
        value !== NOTHING && h("b", {}, value),
      ),
    ),
  );

// -- the list ------------------------------------------------------------------------------------------------------

function listed(data, ctx) {
  const { list, counts, state, find, page } = data;
  const n = state ? (counts[state] ?? 0) : total(counts);
  if (!list.length) {
    return find
      ? notice(`Nothing matches “${find}”`, h("p", {}, examined(data), " ", further(data, ctx)))
      : notice(state ? `No job is ${STATES[state].word}` : "No jobs", state === "" && firstJob(ctx.id));
  }
  const more = !find && (page + 1) * PAGE < n;
  return [
    jobTable(list, { act: (job) => rowAction(job, ctx) }),
    h(
      "div",
      { class: "pager" },
      find
        ? [h("span", { class: "quiet" }, `${jobs(list.length)} found. `, examined(data)), further(data, ctx)]
        : h(
            "span",
            { class: "quiet" },
            `${exactCount(page * PAGE + 1)}–${exactCount(page * PAGE + list.length)} of ${exactCount(n)}, newest first`,
          ),
      !find && page > 0 && h("a", { href: paths.queue(ctx.id, { state, page: page - 1 || "" }) }, "← newer"),
      more && h("a", { href: paths.queue(ctx.id, { state, page: page + 1 }) }, "older →"),
    ),
  ];
}

const examined = ({ searched, state }) =>
  `Searched ${jobs(searched.examined)}${state ? ` that are ${STATES[state].word}` : ""}, newest first.`;

const further = ({ searched, state, find }, ctx) =>
  searched.cursor !== null &&
  h("a", { href: paths.queue(ctx.id, { state, find, before: searched.cursor }) }, "Search older jobs →");

function rowAction(job, ctx) {
  if (job.state === "failed") return retryButton(job, "found", ctx);
  if (job.state !== "delayed") return null;
  const onclick = async () => {
    await perform(() => api.promote(job.id), `${nameOf(job)} is ready`);
    ctx.ui.found = null;
    ctx.reload();
  };
  return h("button", { type: "button", class: "small", onclick }, "Run now");
}

// -- acting --------------------------------------------------------------------------------------------------------

function actions(queue, counts, ctx) {
  const unstarted = counts.waiting + counts.delayed;
  const ask = (question, verb, work, detail, told = (n) => `${jobs(n)} removed`) => async () => {
    if (!(await confirm(question, verb, detail))) return;
    await perform(work, told);
    ctx.reload();
  };
  const name = queue.name;
  return [
    pauseButton(queue, ctx),
    counts.failed > 0 &&
      h(
        "button",
        {
          type: "button",
          class: "small",
          "data-retry-page": true,
          onclick: async () => {
            await perform(
              () => api.retryFailed(name),
              runAgain,
            );
            ctx.reload();
          },
        },
        `Retry ${count(counts.failed)} failed`,
      ),
    h("button", { type: "button", class: "small", onclick: () => limits(queue, ctx) }, "Limits"),
    counts.delayed > 0 &&
      h(
        "button",
        {
          type: "button",
          class: "small",
          onclick: ask(
            `Run ${jobs(counts.delayed, "delayed")} of ${name} now?`,
            `Run ${jobs(counts.delayed)}`,
            () => api.promoteAll(name),
            "They do not wait for their time or their next attempt any more. This cannot be undone.",
            (n) => `${jobs(n)} ready`,
          ),
        },
        `Run ${count(counts.delayed)} delayed now`,
      ),
    unstarted > 0 &&
      h(
        "button",
        {
          type: "button",
          class: "small danger",
          onclick: ask(
            `Remove ${jobs(unstarted, "waiting and delayed")} of ${name}?`,
            `Remove ${jobs(unstarted)}`,
            () => api.drain(name),
            "They cannot be brought back. Running jobs continue; completed and failed ones stay.",
          ),
        },
        "Remove waiting",
      ),
    counts.completed > 0 &&
      h(
        "button",
        {
          type: "button",
          class: "small danger",
          onclick: ask(
            `Remove ${jobs(counts.completed, "completed")} of ${name}?`,
            `Remove ${jobs(counts.completed)}`,
            () => api.clean(name, "completed", counts.completed),
            "Their results go with them and cannot be brought back.",
          ),
        },
        "Remove completed",
      ),
    counts.failed > 0 &&
      h(
        "button",
        {
          type: "button",
          class: "small danger",
          onclick: ask(
            `Remove ${jobs(counts.failed, "failed")} of ${name}?`,
            `Remove ${jobs(counts.failed)}`,
            () => api.purge(name),
            "They cannot be brought back.",
          ),
        },
        "Remove failed",
      ),
  ];
}

// Each limit is set by itself: leaving one alone must not change it.
async function limits(queue, ctx) {
  const name = queue.name;
  const settings = await attempted(() => api.queueSettings(name));
  if (!settings) return;
  const { stall, dlq, limits } = settings;
  const act = (work, told) => async (event) => {
    event.preventDefault();
    const fields = new FormData(event.target.closest("form"));
    if (await perform(() => work(fields), told)) ctx.reload();
  };
  const clear = (work, told) => h("button", { type: "button", class: "small", onclick: act(work, told) }, "No limit");
  await dialog((close) => [
    h("h2", {}, `Limits of ${name}`),
    h(
      "form",
      {
        onsubmit: act((fields) => api.setConcurrency(name, Number(fields.get("running"))), "Concurrency limit set"),
      },
      h(
        "label",
        {},
        "Jobs running at once",
        h(
          "span",
          { class: "pair" },
          h("input", { name: "running", type: "number", min: 0, required: true, placeholder: "no limit", value: limits.concurrencyLimit ?? "" }),
          h("button", { type: "submit", class: "small" }, "Set"),
          clear(() => api.clearConcurrency(name), "Concurrency limit removed"),
        ),
      ),
    ),
    h(
      "form",
      {
        onsubmit: act(
          (fields) => api.setRateLimit(name, Number(fields.get("rate")), Number(fields.get("seconds")) * 1000),
          "Rate limit set",
        ),
      },
      h(
        "label",
        {},
        "Jobs started",
        h(
          "span",
          { class: "pair" },
          h("input", {
            name: "rate",
            type: "number",
            min: 0,
            required: true,
            placeholder: "no limit",
            value: limits.rateLimit?.max ?? "",
            "aria-label": "Jobs",
          }),
          "per",
          h("input", {
            name: "seconds",
            type: "number",
            min: 0.001,
            step: "any",
            value: (limits.rateLimit?.duration ?? 1000) / 1000,
            required: true,
            "aria-label": "Seconds",
          }),
          "s",
          h("button", { type: "submit", class: "small" }, "Set"),
          clear(() => api.clearRateLimit(name), "Rate limit removed"),
        ),
      ),
    ),
    h(
      "p",
      { class: "quiet below" },
      stall.enabled
        ? `A job silent for ${duration(stall.stallInterval)} counts as stalled, ${stall.maxStalls} times at most. `
        : "Stalled jobs are not looked for. ",
      `Failed jobs are kept ${dlq.maxAge === null ? "for good" : `for ${duration(dlq.maxAge)}`}, `,
      `${exactCount(dlq.maxEntries)} at most.`,
    ),
    h("div", { class: "actions" }, h("button", { type: "button", onclick: () => close(false) }, "Close")),
  ]);
}
