// Workers as they present themselves, and the server they talk to.

import * as api from "./api.js";
import { h } from "./dom.js";
import { count, duration } from "./format.js";
import { factList, live, notice, paths, queueLink, section, when } from "./parts.js";

export const title = () => "Workers";
export const load = () => api.overview();

export function view(server) {
  return [h("h1", {}, "Workers"), registered(server.workers), section("Server", null, figures(server))];
}

const figures = ({ stats, metrics, storage }) =>
  factList([
    ["up for", live(stats.uptime, duration)],
    ["connections", live(metrics.activeConnections)],
    ["memory", `${count(metrics.memoryUsageMb)} MB`],
    ["database", `${count(metrics.sqliteSizeMb)} MB`],
    ["pushed", live(metrics.totalPushed)],
    ["completed", live(metrics.totalCompleted)],
    ["storage", storage.error ?? (storage.diskFull ? "disk full" : "accepts writes")],
  ]);

function registered({ list: workers, stats }) {
  if (!workers.length) {
    return notice(
      "No worker is registered",
      h(
        "p",
        {},
        "Workers of Headrace and of the official clients register by themselves when they start. ",
        "Jobs can be pulled without registering, too; such pullers are not listed. The tasks of an app are run by:",
      ),
      h("pre", { class: "code" }, "headrace worker shop.jobs:app"),
    );
  }
  return [
    h(
      "p",
      { class: "lead" },
      `${count(stats.active)} of ${count(stats.total)} alive, `,
      live(stats.activeJobs),
      ` of ${count(stats.concurrencySlots)} slots busy, `,
      live(stats.totalProcessed),
      " jobs done, ",
      live(stats.totalFailed),
      " failed.",
    ),
    h(
      "table",
      { class: "cards" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Worker", "Queues", "Running", "Done", "Failed", "Last seen", "Started"].map((word, i) =>
            h("th", { class: i > 1 ? "n" : null }, word),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        workers.map((worker) =>
          h(
            "tr",
            { key: worker.id, "data-row": true },
            h(
              "td",
              { class: "main" },
              h("span", { class: "name", tabindex: -1, "data-open": true }, worker.name),
              worker.status !== "active" && h("span", { class: "tag warn" }, `! ${worker.status}`),
              h(
                "div",
                { class: "excerpt" },
                `${worker.hostname}, pid ${worker.pid}`,
                worker.currentJob && [", at ", h("a", { href: paths.job(worker.currentJob) }, "this job")],
              ),
            ),
            h(
              "td",
              { "data-label": "Queues" },
              worker.queues.map((name, i) => [i ? ", " : "", queueLink(name)]),
            ),
            h("td", { class: "n", "data-label": "Running" }, live(worker.activeJobs), `/${worker.concurrency}`),
            h("td", { class: "n", "data-label": "Done" }, live(worker.processedJobs)),
            h("td", { class: `n${worker.failedJobs ? " bad" : ""}`, "data-label": "Failed" }, live(worker.failedJobs)),
            h("td", { class: "n", "data-label": "Last seen" }, when(worker.lastSeen)),
            h("td", { class: "n", "data-label": "Started" }, when(worker.registeredAt)),
          ),
        ),
      ),
    ),
  ];
}
