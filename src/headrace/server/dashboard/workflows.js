// Workflows: the latest flows, and one of them as bars over time, rollbacks below what they take back.

import * as api from "./api.js";
import { h } from "./dom.js";
import { duration, excerpt, firstLine } from "./format.js";
import { gantt } from "./gantt.js";
import { now } from "./live.js";
import { badge, confirm, dialog, factList, notice, perform, section, toast, when } from "./parts.js";

export const title = ({ id }) => (id ? `Flow ${id}` : "Workflows");
export const load = ({ id }) => (id ? api.flow(id) : api.flows());

// How a flow stands, in the colours and glyphs of jobs.
const LOOKS = { running: "active", compensating: "delayed", completed: "completed", failed: "failed", cancelled: "paused" };
const status = (flow) => badge(LOOKS[flow.status] ?? "waiting", flow.status);
const path = (id) => `#/workflows/${encodeURIComponent(id)}`;

export const view = (data, ctx) => (ctx.id ? flowPage(data, ctx) : list(data.flows));

function list(flows) {
  if (!flows.length) {
    return [
      h("h1", {}, "Workflows"),
      notice(
        "No workflow has run on this server",
        h("p", {}, "A run is drawn here as bars over time: attempts one below the other, compensation below them."),
        h("p", {}, "Programs start one; docs/workflows.md has a whole order, from its steps to its rollbacks:"),
        h("pre", { class: "code" }, 'await flows.execute(process_order, Order("o-1", 900), id="order-1")'),
      ),
    ];
  }
  return [
    h("h1", {}, "Workflows"),
    h(
      "table",
      { class: "cards" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Flow", "Workflow", "Status", "Began", "Took"].map((word, i) => h("th", { class: i > 2 ? "n" : null }, word)),
        ),
      ),
      h("tbody", {}, flows.map(row)),
    ),
  ];
}

const row = (flow) =>
  h(
    "tr",
    { key: flow.id, "data-row": true },
    h("td", { class: "main" }, h("a", { class: "name", href: path(flow.id), "data-open": true }, flow.id)),
    h("td", { "data-label": "Workflow" }, flow.workflow),
    h("td", { "data-label": "Status" }, status(flow)),
    h("td", { class: "n", "data-label": "Began" }, when(flow.createdAt)),
    h("td", { class: "n", "data-label": "Took" }, duration((flow.endedAt ?? now()) - flow.createdAt)),
  );

// -- one flow --------------------------------------------------------------------------------------------------------

const OUTCOMES = {
  completed: ["completed", "step"],
  failed: ["failed", "step"],
  "attempt-failed": ["failed", "attempt failed"],
  "rolled-back": ["delayed", "rolled back"],
  "rollback-failed": ["failed", "rollback failed"],
};

/** The rows of the picture: [{label, kind, from, to, note, hint}], one for every attempt in the log. */
export function bars(entries) {
  const rows = [];
  const undoing = new Set();
  for (const entry of entries) {
    if (entry.kind === "rolling-back") undoing.add(entry.step);
    const known = OUTCOMES[entry.kind];
    if (!known) continue;
    const [kind, word] = known;
    const from = entry.body?.began || entry.at;
    const error = entry.body?.error;
    rows.push({
      label: undoing.has(entry.step) ? `↩ ${entry.step}` : entry.step,
      kind,
      from,
      to: entry.at,
      note: duration(entry.at - from),
      worker: entry.body?.worker,
      hint: error ? `${word}: ${error.type}: ${error.message ?? ""}` : `${word}, attempt ${entry.attempt ?? 1}`,
    });
  }
  return rows;
}

const STEPS = {
  completed: ["completed", "✓", "done"],
  failed: ["failed", "✕", "failed"],
  "attempt-failed": ["active", "▶", "tried again"],
  sleeping: ["delayed", "◷", "sleeps"],
  waiting: ["waiting", "◔", "waits for its signal"],
  "rolling-back": ["delayed", "↩", "being rolled back"],
  "rolled-back": ["delayed", "↩", "rolled back"],
  "rollback-failed": ["failed", "✕", "rollback failed"],
};
const AT_WORK = ["active", "▶", "at work"];
const NOT_REACHED = ["paused", "·", "not reached"];
const CUT_SHORT = ["paused", "·", "cut short"];
// What a step was in the middle of when the flow ended: it is not any more.
const UNFINISHED = new Set([STEPS["attempt-failed"], STEPS.sleeping, STEPS.waiting]);

/** How each step of the plan stands: a map from its name to [look, glyph, words]. */
function standing(groups, entries, isRunning) {
  const found = new Map();
  for (const entry of entries) if (STEPS[entry.kind]) found.set(entry.step, STEPS[entry.kind]);
  const isDone = (step) => found.get(step.name) === STEPS.completed;
  const atWork = isRunning ? groups.find((group) => !group.every(isDone)) : null;
  for (const group of groups) {
    for (const { name } of group) {
      if (!found.has(name)) found.set(name, group === atWork ? AT_WORK : NOT_REACHED);
      else if (!isRunning && UNFINISHED.has(found.get(name))) found.set(name, CUT_SHORT);
    }
  }
  return found;
}

const stand = (look, glyph, words) =>
  h("span", { class: `state ${look}` }, h("span", { class: "glyph", "aria-hidden": "true" }, glyph), words);

/** The plan as columns: a group is entered when the one before it is complete, its steps run side by side. */
function graph(groups, looks) {
  return h(
    "ol",
    { class: "plan" },
    groups.map((group) =>
      h(
        "li",
        {},
        h(
          "ul",
          {},
          group.map((step) => h("li", {}, h("span", { class: "name" }, step.name), stand(...looks.get(step.name)))),
        ),
      ),
    ),
  );
}

// -- acting ----------------------------------------------------------------------------------------------------------

const HEARD = "As soon as a worker of this workflow is running";

function actions(flow, looks, ctx) {
  if (flow.status !== "running") return [];
  const waiting = [...looks].filter(([, look]) => look === STEPS.waiting).map(([name]) => name);
  const button = (word, style, onclick) => h("button", { type: "button", class: style, onclick, key: word }, word);
  return [
    ...waiting.map((name) => button(`Signal ${name}`, null, () => signal(flow, name, ctx))),
    button("Cancel flow", "danger", () => cancel(flow, ctx)),
  ];
}

async function cancel(flow, ctx) {
  const detail = `${HEARD}, no further step starts, and the completed ones are rolled back.`;
  if (!(await confirm(`Cancel flow ${flow.id}?`, "Cancel flow", detail))) return;
  await perform(() => api.cancelFlow(flow.id, "cancelled on the dashboard"), "It is being cancelled");
  ctx.reload();
}

async function signal(flow, name, ctx) {
  const send = (close) => async (event) => {
    event.preventDefault();
    let payload;
    try {
      payload = JSON.parse(new FormData(event.target).get("payload"));
    } catch {
      toast('That is not JSON: strings need quotes, "yes"', "bad");
      return;
    }
    if (await perform(() => api.signalFlow(flow.id, name, payload), `${name} is on its way`)) close(true);
    ctx.reload();
  };
  await dialog((close) => [
    h("h2", {}, `Signal ${name}`),
    h("p", { class: "quiet" }, `${HEARD}, the flow continues with this as the result of ${name}.`),
    h(
      "form",
      { onsubmit: send(close) },
      h("label", {}, "Payload (JSON)", h("textarea", { name: "payload", rows: 3, spellcheck: "false" }, "null")),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", onclick: () => close(false) }, "Close"),
        h("button", { type: "submit", class: "primary" }, "Send signal"),
      ),
    ),
  ]);
}

const CAUSES = {
  step: ({ step }) => `The step ${step} failed`,
  timeout: ({ at }, flow) => `The workflow did not end in time: it was stopped after ${duration(at - flow.createdAt)}`,
  cancel: () => "The flow was cancelled",
  complete: () => "All steps were done, but what runs on completion failed",
};

/** An id as a shell takes it. */
const quoted = (id) => (/^[\w.,:~@/+-]+$/.test(id) ? id : `'${id.replaceAll("'", "'\\''")}'`);

// -- the page --------------------------------------------------------------------------------------------------------

function flowPage({ flow, steps }, ctx) {
  const groups = steps[0]?.body?.plan?.groups ?? [];
  const looks = standing(groups, steps, flow.status === "running");
  const rows = bars(steps);
  const failure = steps.find((entry) => entry.kind === "compensating");
  const error = failure?.body?.error;
  return [
    h(
      "div",
      { class: "head" },
      h("h1", {}, flow.id, " ", status(flow)),
      h("div", { class: "actions" }, actions(flow, looks, ctx)),
    ),
    factList([
      ["Workflow", flow.workflow],
      ["Began", when(flow.createdAt)],
      ["Took", duration((flow.endedAt ?? now()) - flow.createdAt)],
    ]),
    (flow.status === "failed" || flow.status === "cancelled") &&
      h(
        "p",
        { class: "quiet" },
        "To run it again: ",
        h("code", {}, `headrace flow retry ${quoted(flow.id)}`),
        ". What was done and not rolled back is kept.",
      ),
    groups.length > 0 && section("Steps", null, graph(groups, looks)),
    section(
      "Timeline",
      null,
      rows.length ? gantt(rows, Math.floor(ctx.width)) : h("p", { class: "quiet" }, "No step has ended yet."),
    ),
    failure &&
      section(
        "Failure",
        null,
        h(
          "pre",
          { class: "code error-text" },
          h("strong", {}, CAUSES[failure.body.cause]?.(failure, flow) ?? failure.body.cause),
          error ? `\n${error.traceback || `${error.type}: ${error.message ?? ""}`}` : "",
        ),
      ),
    section(
      "Log",
      null,
      h(
        "table",
        { class: "cards" },
        h("tbody", {}, steps.map((entry) => line(entry, flow))),
      ),
    ),
  ];
}

const line = (entry, flow) =>
  h(
    "tr",
    { key: String(entry.seq) },
    h("td", { class: "n" }, `+${duration(entry.at - flow.createdAt)}`),
    h("td", { class: "kind" }, entry.kind.replace("-", " ")),
    h("td", { class: "step" }, entry.step ?? ""),
    h("td", { class: "told excerpt" }, told(entry)),
  );

/** What went in, came out or went wrong, in one line. */
function told({ body }) {
  if (body?.error) return `${body.error.type}: ${firstLine(body.error.message)}`;
  return excerpt(body?.result ?? body?.data, 200);
}
