// Workers as they present themselves.

import * as api from "./api.js";
import { h } from "./dom.js";
import { count } from "./format.js";
import { live, notice, paths, queueLink, when } from "./parts.js";

export const title = () => "Workers";
export const load = () => api.workers();

export function view({ workers, stats }) {
  if (!workers.length) {
    return [h("h1", {}, "Workers"), notice("No worker is registered",
      h("p", {}, "Official clients register by themselves when a Worker starts. Jobs can be pulled without registering, too; such pullers are not listed."))];
  }
  return [
    h("h1", {}, "Workers"),
    h("p", { class: "lead" }, `${count(stats.active)} of ${count(stats.total)} alive, `, live(stats.activeJobs), ` of ${count(stats.concurrencySlots)} slots busy, `,
      live(stats.totalProcessed), " jobs done, ", live(stats.totalFailed), " failed."),
    h("table", { class: "cards" },
      h("thead", {}, h("tr", {}, ["Worker", "Queues", "Running", "Done", "Failed", "Last seen", "Up since"].map((word, i) => h("th", { class: i > 1 ? "n" : null }, word)))),
      h("tbody", {}, workers.map((worker) => h("tr", { key: worker.id, "data-row": true },
        h("td", { class: "main" },
          h("span", { class: "name", tabindex: -1, "data-open": true }, worker.name),
          worker.status !== "active" && h("span", { class: "tag warn" }, `! ${worker.status}`),
          h("div", { class: "excerpt" }, `${worker.hostname}, pid ${worker.pid}`,
            worker.currentJob && [", at ", h("a", { href: paths.job(worker.currentJob) }, "this job")])),
        h("td", { "data-label": "Queues" }, worker.queues.map((name, i) => [i ? ", " : "", queueLink(name)])),
        h("td", { class: "n", "data-label": "Running" }, live(worker.activeJobs), `/${worker.concurrency}`),
        h("td", { class: "n", "data-label": "Done" }, live(worker.processedJobs)),
        h("td", { class: `n${worker.failedJobs ? " bad" : ""}`, "data-label": "Failed" }, live(worker.failedJobs)),
        h("td", { class: "n", "data-label": "Last seen" }, when(worker.lastSeen)),
        h("td", { class: "n", "data-label": "Up since" }, when(worker.registeredAt)))))),
  ];
}
