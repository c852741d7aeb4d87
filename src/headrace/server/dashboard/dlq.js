// Failed jobs, grouped by what went wrong; select and retry.

import * as api from "./api.js";
import { h } from "./dom.js";
import { retry } from "./failures.js";
import { exactCount, excerpt, firstLine, jobs, nameOf, signature } from "./format.js";
import { attempted, confirm, fresh, notice, paths, perform, queueLink, when } from "./parts.js";

const MOST_QUEUES = 10;
const MOST_LETTERS = 200;
const FEW = 6;
const FRESH_MS = 4500;
const LETTER_HEADS = ["", "Job", "Queue", "Attempts", "Failed", ""];

export const title = () => "Failures";

export async function load(ctx) {
  const rows = await api.queues();
  const groups = await failureGroups(ctx, rows, ctx.query.queue);
  return {
    groups,
    total: rows.reduce((sum, row) => sum + row.failed, 0),
    failing: rows
      .filter((row) => row.failed)
      .map((row) => row.name)
      .sort(),
  };
}

/** Groups of dead letters by signature, the newest first. Asked for anew when a count changed or time has passed. */
function failureGroups(ctx, rows, only) {
  const failing = rows
    .filter((row) => row.failed && (only ? row.name === only : api.hasPath(row.name)))
    .sort((a, b) => b.failed - a.failed)
    .slice(0, MOST_QUEUES);
  const stamp = failing.map((row) => `${row.name} ${row.failed}`).join();
  const lists = () => Promise.all(failing.map((row) => api.deadLetters(row.name, row.failed, MOST_LETTERS)));
  return fresh(ctx.ui, "failures", FRESH_MS, stamp, async () => group((await lists()).flat()));
}

function group(letters) {
  const groups = new Map();
  for (const letter of letters) {
    const error = letter.error ?? "";
    const key = signature(error);
    if (!groups.has(key)) groups.set(key, { key, letters: [], lastSeen: 0, example: error });
    const found = groups.get(key);
    found.letters.push(letter);
    if (letter.enteredAt >= found.lastSeen) Object.assign(found, { lastSeen: letter.enteredAt, example: error });
  }
  return [...groups.values()].sort((a, b) => b.lastSeen - a.lastSeen);
}

const queuesOf = (found) => [...new Set(found.letters.map((letter) => letter.queue))].sort();

export function view({ groups, total, failing }, ctx) {
  const chosen = (ctx.ui.chosen ??= new Set());
  const all = groups.flatMap((found) => found.letters);
  const present = new Set(all.map((letter) => letter.job.id));
  for (const id of chosen) if (!present.has(id)) chosen.delete(id);
  const only = ctx.query.queue ?? "";
  return [
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Failures"),
      h(
        "div",
        { class: "actions" },
        failing.length > 1 &&
          h(
            "select",
            { "aria-label": "Queue", value: only, onchange: (event) => ctx.go({ queue: event.currentTarget.value }) },
            h("option", { value: "" }, "all queues"),
            failing.map((name) => h("option", { value: name, selected: name === only }, name)),
          ),
        all.length > 0 &&
          h(
            "button",
            {
              type: "button",
              class: "primary",
              disabled: !chosen.size,
              "data-retry-page": true,
              onclick: () =>
                retry(
                  all.filter((letter) => chosen.has(letter.job.id)),
                  ctx,
                ),
            },
            chosen.size ? `Retry ${jobs(chosen.size)}` : "Retry selected",
          ),
        only && h("button", { type: "button", class: "danger", onclick: () => purge(only, ctx) }, "Remove all"),
      ),
    ),
    !all.length
      ? notice(
          "Nothing has failed",
          h("p", {}, "Jobs that used up their attempts are kept here until they are retried or removed."),
        )
      : [
          all.length < total &&
            !only &&
            h("p", { class: "quiet" }, `The newest ${exactCount(all.length)} of ${exactCount(total)} failed jobs.`),
          groups.map((found) => groupSection(found, chosen, ctx)),
        ],
  ];
}

function groupSection(found, chosen, ctx) {
  const ids = found.letters.map((letter) => letter.job.id);
  const whole = ids.every((id) => chosen.has(id));
  const toggle = (list, on) => {
    for (const id of list) on ? chosen.add(id) : chosen.delete(id);
    ctx.redraw();
  };
  const unfolded = (ctx.ui.opened ??= new Set());
  const shown = unfolded.has(found.key) ? found.letters : found.letters.slice(0, FEW);
  return h(
    "details",
    { key: found.key, class: "group", open: true },
    h(
      "summary",
      {},
      h("input", {
        type: "checkbox",
        checked: whole,
        "aria-label": `Select all ${ids.length}: ${found.key}`,
        onclick: (event) => event.stopPropagation(),
        onchange: (event) => toggle(ids, event.currentTarget.checked),
      }),
      h("span", { class: "error" }, firstLine(found.example) || found.key),
      h(
        "span",
        { class: "quiet" },
        `${jobs(ids.length)}, last seen `,
        when(found.lastSeen),
        ` in ${queuesOf(found).join(", ")}`,
      ),
    ),
    h(
      "table",
      { class: "cards" },
      h(
        "colgroup",
        {},
        LETTER_HEADS.map(() => h("col", {})),
      ),
      h(
        "thead",
        { class: "hidden" },
        h(
          "tr",
          {},
          LETTER_HEADS.map((word) => h("th", {}, word)),
        ),
      ),
      h(
        "tbody",
        {},
        shown.map((letter) =>
          h(
            "tr",
            { key: letter.job.id, "data-row": true },
            h(
              "td",
              { class: "tick-box" },
              h("input", {
                type: "checkbox",
                checked: chosen.has(letter.job.id),
                "aria-label": `Select ${nameOf(letter.job)}`,
                onchange: (event) => toggle([letter.job.id], event.currentTarget.checked),
              }),
            ),
            h(
              "td",
              { class: "main" },
              h("a", { class: "name", href: paths.job(letter.job.id), "data-open": true }, nameOf(letter.job)),
              h("div", { class: "excerpt" }, excerpt(letter.job.data)),
            ),
            h("td", { "data-label": "Queue" }, queueLink(letter.queue)),
            h("td", { class: "n", "data-label": "Attempts" }, `${letter.job.attempts}/${letter.job.maxAttempts}`),
            h("td", { class: "n", "data-label": "Failed" }, when(letter.enteredAt)),
            h(
              "td",
              { class: "act" },
              h(
                "button",
                { type: "button", class: "small", "data-retry": true, onclick: () => retry([letter], ctx) },
                "Retry",
              ),
            ),
          ),
        ),
      ),
    ),
    shown.length < ids.length &&
      h(
        "button",
        {
          type: "button",
          class: "small",
          onclick: () => {
            unfolded.add(found.key);
            ctx.redraw();
          },
        },
        `Show ${exactCount(ids.length - shown.length)} more`,
      ),
  );
}

async function purge(queue, ctx) {
  const detail = await attempted(() => api.queue(queue));
  if (!detail) return;
  const total = detail.counts.failed;
  if (
    !(await confirm(
      `Remove ${jobs(total, "failed")} of ${queue}?`,
      `Remove ${jobs(total)}`,
      "They cannot be brought back.",
    ))
  )
    return;
  await perform(
    () => api.purge(queue),
    (n) => `Removed ${jobs(n)} of ${queue}`,
  );
  ctx.ui.failures = null;
  ctx.go({ queue: "" });
}
