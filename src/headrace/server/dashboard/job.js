// One job: its life as a picture, what went in and came out, what went wrong, its log and its family.

import * as api from "./api.js";
import { h } from "./dom.js";
import { age, clockTime, duration, exactTime, firstLine, nameOf } from "./format.js";
import { gantt } from "./gantt.js";
import { now } from "./live.js";
import { attempt, badge, confirm, copyButton, fresh, paths, perform, queueLink, section, when } from "./parts.js";
import { tree } from "./tree.js";

const MOST_RELATIVES = 40;
const FAMILY_FRESH_MS = 2500;

export const title = (ctx) => (ctx.data ? nameOf(ctx.data.job) : "Job");

export async function load(ctx) {
  const [job, logs] = await Promise.all([api.job(ctx.id), api.logs(ctx.id)]);
  const [family, names] = await Promise.all([familyOf(job, ctx), workerNames(job, ctx)]);
  return { job, logs, family, names };
}

// Names of workers hardly change; they are asked for again when one is not among them.
async function workerNames(job, ctx) {
  const ids = job.timeline.map((entry) => entry.worker).filter(Boolean);
  if (ids.length && !ids.every((id) => ctx.ui.names?.has(id))) {
    ctx.ui.names = new Map([...ids.map((id) => [id, id]), ...(await api.workerNames())]);
  }
  return ctx.ui.names ?? new Map();
}

// -- family --------------------------------------------------------------------------------------------------------

function familyOf(job, ctx) {
  if (!job.parentId && !job.childrenIds.length && !job.dependsOn.length) return null;
  return fresh(ctx.ui, "family", FAMILY_FRESH_MS, job.id, () => membersOf(job));
}

async function membersOf(job) {
  const root = (await ancestor(job)) ?? job;
  let room = MOST_RELATIVES;
  const grow = async (member) => {
    const ids = [...new Set([...member.childrenIds, ...member.dependsOn])].slice(0, Math.max(0, room));
    room -= ids.length;
    const children = await Promise.all(
      ids.map(async (id) => (await api.jobIfKept(id)) ?? { id, state: "unknown", childrenIds: [], dependsOn: [] }),
    );
    return { job: member, children: await Promise.all(children.map(grow)) };
  };
  return grow(root);
}

async function ancestor(job) {
  let top = null;
  for (let id = job.parentId, steps = 0; id && steps < 10; id = top?.parentId, steps += 1) {
    const parent = await api.jobIfKept(id);
    if (!parent) break;
    top = parent;
  }
  return top;
}

const branch = (node, here) =>
  h(
    "li",
    { key: node.job.id },
    badge(node.job.state),
    " ",
    node.job.id === here
      ? h("strong", {}, nameOf(node.job))
      : node.job.queue
        ? h("a", { href: paths.job(node.job.id) }, nameOf(node.job))
        : h("code", {}, node.job.id),
    node.job.queue && h("span", { class: "quiet" }, ` in ${node.job.queue}`),
    node.children.length > 0 &&
      h(
        "ul",
        {},
        node.children.map((child) => branch(child, here)),
      ),
  );

// -- life ----------------------------------------------------------------------------------------------------------

const WORDS = { waiting: "waiting", delayed: "delayed", active: "attempt", "waiting-children": "children" };

const BACKOFF_CAP_MS = 3_600_000;

/** Bars between the entries of the timeline, in order. */
export function life(job, names = new Map()) {
  const entries = job.timeline;
  const ended = job.state === "completed" || job.state === "failed";
  const rows = [];
  let attempts = 0;
  entries.forEach((entry, index) => {
    const next = entries[index + 1];
    const isEnd = entry.state === "completed" || (entry.state === "failed" && (!next || next.state === "waiting"));
    if (isEnd || (!next && ended)) return;
    if (entry.state === "active") attempts += 1;
    const isRetry = entries[index - 1]?.state === "failed" && entry.attempt > 1;
    rows.push(
      ...bars({ entry, next, isRetry, attempts, to: next?.timestamp ?? Math.max(now(), entry.timestamp), job, names }),
    );
  });
  return rows;
}

function bars({ entry, next, isRetry, attempts, to, job, names }) {
  const from = entry.timestamp;
  if (entry.state === "active") {
    const kind =
      next?.state === "completed" ? "completed" : next?.error || next?.state === "failed" ? "failed" : "active";
    const worker = names.get(entry.worker) ?? entry.worker;
    return [{ ...span(`attempt ${attempts}`, kind, from, to, next, worker), worker }];
  }
  if (!isRetry && entry.state !== "delayed")
    return [span(entry.error ? "after a stall" : (WORDS[entry.state] ?? entry.state), "waiting", from, to, next)];
  const word = isRetry ? "backoff" : "delayed";
  const { until, isKnown } = putOffUntil({ entry, isRetry, to, job });
  if (until >= to) return [span(word, "delayed", from, to, next)];
  return [
    span(isKnown ? word : `${word}, about`, "delayed", from, until, entry),
    span("waiting", "waiting", until, to, next),
  ];
}

// The job knows when it may run next, not when it might have before: earlier backoffs are drawn with their average.
function putOffUntil({ entry, isRetry, to, job }) {
  const from = entry.timestamp;
  if (job.runAt >= from && job.runAt <= to) return { until: job.runAt, isKnown: true };
  if (!isRetry) return { until: to, isKnown: true };
  const base = job.backoffConfig?.delay ?? job.backoff;
  const grown = job.backoffConfig?.type === "fixed" ? base : base * 2 ** (entry.attempt - 1);
  return { until: from + Math.min(grown, job.backoffConfig?.maxDelay ?? BACKOFF_CAP_MS), isKnown: false };
}

const span = (label, kind, from, to, next, worker) => ({
  label,
  kind,
  from,
  to,
  open: !next,
  note: duration(to - from),
  hint: [
    `${label}: ${clockTime(from, true)} to ${next ? clockTime(to, true) : "now"}, ${duration(to - from)}`,
    worker && `by ${worker}`,
    next?.error && firstLine(next.error),
  ]
    .filter(Boolean)
    .join("\n"),
});

// -- what the state allows -------------------------------------------------------------------------------------------

// The column of the server's state table that a person may use without holding the lease of the job.
export const ALLOWED = {
  waiting: ["cancel", "discard"],
  prioritized: ["cancel", "discard"],
  "waiting-children": ["cancel", "discard"],
  delayed: ["promote", "cancel", "discard"],
  failed: ["retry", "remove"],
  completed: ["again"],
  active: ["stop"],
};
const VERBS = {
  retry: {
    word: "Retry",
    key: true,
    style: "primary",
    run: (job) => api.retryFailed(job.queue, job.id),
    told: "It runs again",
  },
  remove: {
    word: "Remove",
    style: "danger",
    run: (job) => api.removeFailed(job.queue, job.id),
    told: "It is removed",
    ask: (name) => `Remove the failed job ${name}?`,
    sure: "Remove job",
    detail: "It cannot be brought back.",
    leaves: true,
  },
  again: {
    word: "Run again",
    key: true,
    run: (job) => api.retryCompleted(job.queue, job.id),
    told: "It runs again",
    ask: (name) => `Run ${name} again?`,
    sure: "Run again",
    detail: "Its present result will be replaced.",
  },
  promote: { word: "Run now", style: "primary", run: (job) => api.promote(job.id), told: "It is ready" },
  cancel: {
    word: "Cancel",
    style: "danger",
    run: (job) => api.cancel(job.id),
    told: "It is cancelled",
    ask: (name) => `Cancel the job ${name}?`,
    sure: "Cancel job",
    detail: "It is removed and will not run.",
    leaves: true,
  },
  stop: {
    word: "Cancel",
    style: "danger",
    run: (job) => api.cancelActive(job.id),
    told: "It is cancelled",
    ask: (name) => `Cancel the job ${name} while it runs?`,
    sure: "Cancel job",
    detail: "It is removed. Its worker is told with its next heartbeat; what it has done so far is not undone.",
    leaves: true,
  },
  discard: { word: "Move to failures", run: (job) => api.discard(job.id), told: "It is among the failures" },
};

const button = (name, job, ctx) => {
  const verb = VERBS[name];
  const onclick = async () => {
    if (verb.ask && !(await confirm(verb.ask(nameOf(job)), verb.sure, verb.detail))) return;
    // The job is about to be gone: the page must not ask for it once more on its way out.
    ctx.leaving = verb.leaves;
    const done = await perform(() => verb.run(job), verb.told);
    if (done && verb.leaves) location.hash = paths.queue(job.queue);
    else {
      ctx.leaving = false;
      ctx.reload();
    }
  };
  return h("button", { type: "button", class: verb.style, onclick, "data-retry-page": verb.key }, verb.word);
};

// -- the page --------------------------------------------------------------------------------------------------------

export function view({ job, logs, family, names }, ctx) {
  const width = Math.floor(ctx.width >= 900 ? ctx.width - 320 - 32 : ctx.width);
  const rows = life(job, names);
  return [
    h(
      "div",
      { class: "head" },
      h("h1", {}, nameOf(job), " ", badge(job.state)),
      h(
        "div",
        { class: "actions" },
        (ALLOWED[job.state] ?? []).map((name) => button(name, job, ctx)),
      ),
    ),
    h(
      "div",
      { class: "job-top" },
      section(
        "Timeline",
        null,
        rows.length ? gantt(rows, width) : h("p", { class: "quiet" }, "Nothing has happened yet."),
        progress(job),
      ),
      facts(job),
    ),
    (job.failedReason || job.stacktrace?.length) &&
      section(
        job.state === "failed" ? "Error" : "Last error",
        copyButton(() => [job.failedReason, ...(job.stacktrace ?? [])].join("\n")),
        h(
          "pre",
          { class: "code error-text" },
          h("strong", {}, job.failedReason ?? ""),
          job.stacktrace?.length ? `\n${stack(job)}` : "",
        ),
      ),
    section("Data", viewer(ctx, "data", job.data), body(ctx, "data", job.data)),
    "returnvalue" in job &&
      section("Result", viewer(ctx, "result", job.returnvalue), body(ctx, "result", job.returnvalue)),
    section("Log", null, logs.length ? logTable(logs) : h("p", { class: "quiet" }, "No log lines.")),
    family && section("Family", null, h("ul", { class: "family" }, branch(family, job.id))),
  ];
}

// Clients often repeat the message as the first line of the stack.
const stack = (job) => job.stacktrace.filter((line, i) => i || !line.includes(job.failedReason ?? "\0")).join("\n");

const progress = (job) =>
  job.progress > 0 &&
  job.state === "active" &&
  h(
    "p",
    {},
    h("progress", { max: 100, value: job.progress }),
    ` ${Math.round(job.progress)} %`,
    job.progressMessage && h("span", { class: "quiet" }, ` ${job.progressMessage}`),
  );

function facts(job) {
  const shown = [
    ["Queue", queueLink(job.queue)],
    ["Attempt", attempt(job)],
    job.state === "delayed" && [
      "Next run",
      h("span", {}, when(job.runAt), h("span", { class: "quiet" }, ` ${exactTime(job.runAt)}`)),
    ],
    ["Created", h("span", { title: age(job.createdAt, now()) }, exactTime(job.createdAt))],
    job.startedAt && ["Started", exactTime(job.startedAt)],
    job.completedAt && ["Finished", exactTime(job.completedAt)],
    job.startedAt && job.completedAt && ["Ran for", duration(job.completedAt - job.startedAt)],
    job.priority !== 0 && ["Priority", String(job.priority)],
    job.stallCount > 0 && ["Stalls", String(job.stallCount)],
    job.customId && job.customId !== job.id && ["Custom id", h("code", {}, job.customId)],
    job.uniqueKey && ["Unique key", h("code", {}, job.uniqueKey)],
    job.groupId && ["Group", job.groupId],
    job.tags.length > 0 && ["Tags", job.tags.join(", ")],
    job.timeout && ["Timeout", duration(job.timeout)],
    [
      "Id",
      h(
        "span",
        { class: "id" },
        h("code", {}, job.id),
        copyButton(() => job.id),
      ),
    ],
  ].filter(Boolean);
  return h(
    "dl",
    { class: "pairs" },
    shown.map(([word, value]) => [h("dt", { key: `t${word}` }, word), h("dd", { key: `d${word}` }, value)]),
  );
}

const viewer = (ctx, name, value) => [
  h(
    "button",
    {
      type: "button",
      class: "small",
      "aria-pressed": String(ctx.ui[name] === "raw"),
      onclick: () => {
        ctx.ui[name] = ctx.ui[name] === "raw" ? "tree" : "raw";
        ctx.redraw();
      },
    },
    "Raw",
  ),
  copyButton(() => JSON.stringify(value, null, 2)),
];

const body = (ctx, name, value) =>
  ctx.ui[name] === "raw"
    ? h("pre", { class: "code", key: "raw" }, JSON.stringify(value, null, 2))
    : h("div", { class: "tree", key: "tree" }, tree(value));

const logTable = (logs) =>
  h(
    "table",
    { class: "logs" },
    h(
      "thead",
      { class: "hidden" },
      h(
        "tr",
        {},
        ["Time", "Level", "Message"].map((word) => h("th", {}, word)),
      ),
    ),
    h(
      "tbody",
      {},
      logs.map((line, i) =>
        h(
          "tr",
          { key: `${line.timestamp} ${i}`, class: line.level },
          h("td", {}, h("time", { title: exactTime(line.timestamp) }, clockTime(line.timestamp, true))),
          h("td", {}, line.level),
          h("td", {}, line.message),
        ),
      ),
    ),
  );
