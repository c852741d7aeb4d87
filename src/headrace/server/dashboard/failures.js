// The latest failures in a few rows, for the overview; and retrying, for every page that lists them.

import * as api from "./api.js";
import { h } from "./dom.js";
import { count, excerpt, nameOf, runAgain, signature } from "./format.js";
import { attempted, fresh, paths, perform, queueLink, when } from "./parts.js";

const MOST_RETRIED = 2000;
const FRESH_MS = 4500;

/** Groups as the server makes them, with the newest job of each so that a person recognises it. */
export const latestFailures = (ctx, total) =>
  fresh(ctx.ui, "failures", FRESH_MS, total, () => newestGroups(ctx, total));

async function newestGroups(ctx, total) {
  const { groups } = total ? await api.failures() : { groups: [] };
  const seen = ctx.ui.newest ?? new Map();
  await Promise.all(
    groups.map(async (found) => {
      const id = found.jobIds[0];
      found.newest = seen.has(id) ? seen.get(id) : await api.jobIfKept(id);
    }),
  );
  // No more than is shown: a page may be left open for weeks.
  ctx.ui.newest = new Map(groups.map((found) => [found.jobIds[0], found.newest]));
  return groups;
}

/** A row per kind of error; it opens the newest job of that kind. */
export function groupTable(groups, ctx) {
  return h(
    "table",
    { class: "failures cards" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", {}, "Error"),
        h("th", {}, "Queues"),
        h("th", { class: "n" }, "Jobs"),
        h("th", { class: "n" }, "Last seen"),
        h("th", { class: "act" }, h("span", { class: "hidden" }, "Actions")),
      ),
    ),
    h(
      "tbody",
      {},
      groups.map((found) =>
        h(
          "tr",
          { key: found.signature, "data-row": true },
          h(
            "td",
            { class: "main" },
            h(
              "a",
              { class: "error", href: paths.job(found.jobIds[0]), "data-open": true, title: found.error },
              found.error,
            ),
            found.newest &&
              h("div", { class: "excerpt" }, `${nameOf(found.newest)}: ${excerpt(found.newest.data, 70)}`),
          ),
          h(
            "td",
            { "data-label": "Queues" },
            found.queues.map((name, i) => [i ? ", " : "", queueLink(name)]),
          ),
          h("td", { class: "n", "data-label": "Jobs" }, count(found.count)),
          h("td", { class: "n", "data-label": "Last seen" }, when(found.lastSeen)),
          h(
            "td",
            { class: "act" },
            h(
              "button",
              { type: "button", class: "small", "data-retry": true, onclick: () => retryGroup(found, ctx) },
              found.count === 1 ? "Retry" : `Retry ${count(found.count)}`,
            ),
          ),
        ),
      ),
    ),
  );
}

async function retryGroup(found, ctx) {
  const letters = async (name) => api.deadLetters(name, (await api.queue(name)).counts.failed, MOST_RETRIED);
  const lists = await attempted(() => Promise.all(found.queues.map(letters)));
  if (!lists) return;
  await retry(
    lists.flat().filter((letter) => signature(letter.error ?? "") === found.signature),
    ctx,
  );
}

/** Lets one failed job run again; what was kept in `ctx.ui` by that name is asked for anew. */
export function retryButton(job, kept, ctx) {
  const onclick = async () => {
    await perform(() => api.retryFailed(job.queue, job.id), `${nameOf(job)} runs again`);
    ctx.ui[kept] = null;
    ctx.reload();
  };
  return h("button", { type: "button", class: "small", "data-retry": true, onclick }, "Retry");
}

/** Let dead letters run again and say how many did. */
export async function retry(letters, ctx) {
  await perform(
    async () => {
      const queues = [...new Set(letters.map((letter) => letter.queue))];
      const idsOf = (name) => letters.filter((letter) => letter.queue === name).map((letter) => letter.job.id);
      const done = await Promise.all(queues.map((name) => api.retryMany(name, idsOf(name))));
      return done.reduce((sum, n) => sum + n, 0);
    },
    (done) => (done === 1 ? `${nameOf(letters[0].job)} runs again` : runAgain(done)),
  );
  ctx.ui.failures = null;
  ctx.reload();
}
