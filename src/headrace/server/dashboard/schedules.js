// Schedules: what the clock pushes, when it did and when it will.

import * as api from "./api.js";
import { h } from "./dom.js";
import { age, count, duration, exactTime } from "./format.js";
import { now } from "./live.js";
import { STATES, badge, confirm, curl, live, notice, paths, perform, queueLink, when } from "./parts.js";

export const title = () => "Schedules";

export const load = () => api.crons();

const rhythm = (cron) => (cron.schedule ? h("code", {}, cron.schedule) : `every ${duration(cron.repeatEvery)}`);

const then = (cron) =>
  cron.upcoming.length > 1 &&
  h("div", { class: "excerpt" }, `then ${cron.upcoming.slice(1).map((time) => age(time, now())).join(", ")}`);

// What became of the last runs, the latest first; each leads to its job, if that is still there.
const outcomes = (cron) =>
  cron.recent.length > 0 &&
  h(
    "div",
    { class: "runs" },
    cron.recent.map((run) => {
      const mark = badge(run.state, "");
      const said = `${exactTime(run.at)}: ${STATES[run.state]?.word ?? run.state}`;
      return run.state === "unknown"
        ? h("span", { key: run.jobId, title: said, role: "img", "aria-label": said }, mark)
        : h("a", { key: run.jobId, href: paths.job(run.jobId), title: said, "aria-label": said }, mark);
    }),
  );

export function view({ crons, total }, ctx) {
  if (!crons.length) {
    return [
      h("h1", {}, "Schedules"),
      notice(
        "Nothing is scheduled",
        h("p", {}, "A schedule pushes a job at the times of a cron expression, or at a fixed interval:"),
        curl("/crons", '{"name": "nightly", "queue": "reports", "schedule": "0 3 * * *", "data": {}}'),
      ),
    ];
  }
  return [
    h("h1", {}, "Schedules"),
    crons.length < total && h("p", { class: "quiet" }, `The ${count(crons.length)} of ${count(total)} that run next.`),
    h(
      "table",
      { class: "cards" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Name", "Queue", "Schedule", "Next run", "Last runs", "Runs", ""].map((word, i) =>
            h("th", { class: i > 2 && i < 6 ? "n" : i === 6 ? "act" : null }, word),
          ),
        ),
      ),
      h(
        "tbody",
        {},
        crons.map((cron) =>
          h(
            "tr",
            { key: cron.name, "data-row": true },
            h(
              "td",
              { class: "main" },
              h("span", { class: "name", tabindex: -1, "data-open": true }, cron.name),
              cron.jobName && h("div", { class: "excerpt" }, `pushes ${cron.jobName}`),
            ),
            h("td", { "data-label": "Queue" }, queueLink(cron.queue)),
            h(
              "td",
              { "data-label": "Schedule" },
              rhythm(cron),
              cron.timezone && h("span", { class: "quiet" }, ` ${cron.timezone}`),
            ),
            h("td", { class: "n", "data-label": "Next run" }, when(cron.nextRun), then(cron)),
            h("td", { class: "n", "data-label": "Last runs" }, when(cron.lastRun ?? null), outcomes(cron)),
            h(
              "td",
              { class: "n", "data-label": "Runs" },
              live(cron.executions),
              cron.maxLimit > 0 && `/${count(cron.maxLimit)}`,
            ),
            h(
              "td",
              { class: "act" },
              h("button", { type: "button", class: "small", onclick: () => remove(cron, ctx) }, "Delete"),
            ),
          ),
        ),
      ),
    ),
  ];
}

async function remove(cron, ctx) {
  if (
    !(await confirm(`Delete the schedule ${cron.name}?`, "Delete 1 schedule", "Jobs that it has pushed already stay."))
  )
    return;
  await perform(() => api.deleteCron(cron.name), `Deleted ${cron.name}`);
  ctx.reload();
}
