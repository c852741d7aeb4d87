// Jobs of all queues: the newest ones, by queue and state, and search by id or text.

import * as api from "./api.js";
import { h } from "./dom.js";
import { retryButton } from "./failures.js";
import { exactCount } from "./format.js";
import { STATES, fresh, jobTable, notice, typed } from "./parts.js";
import { noQueues } from "./queues.js";

const SHOWN = 50;
const MOST_QUEUES = 12;
const FRESH_MS = 2500;
const SEARCH_FRESH_MS = 10_000;
const CHOICES = ["waiting", "active", "delayed", "completed", "failed"];

export const title = () => "Jobs";

export function load(ctx) {
  const { find = "", queue = "", state = "" } = ctx.query;
  const stamp = JSON.stringify([find, queue, state]);
  return fresh(ctx.ui, "list", find ? SEARCH_FRESH_MS : FRESH_MS, stamp, () => listed(find, queue, state));
}

async function listed(find, queue, state) {
  const rows = await api.queues();
  const exact = find ? await api.jobIfKept(find) : null;
  const asked = rows
    .filter((row) => (queue ? row.name === queue : api.hasPath(row.name)))
    .sort((a, b) => busyness(b) - busyness(a))
    .slice(0, MOST_QUEUES);
  const ask = (name) => (find ? search(name, find, state) : api.jobs(name, { state, limit: SHOWN, asc: false }));
  const lists = exact ? [[exact]] : await Promise.all(asked.map((row) => ask(row.name)));
  const list = lists.flat().sort((a, b) => b.createdAt - a.createdAt);
  return {
    list: list.slice(0, SHOWN),
    names: rows.map((row) => row.name).sort(),
    find,
    queue,
    state,
    partial: asked.length < rows.length && !queue,
  };
}

const search = async (name, text, state) => (await api.search(name, { text, state, limit: SHOWN })).jobs;

const busyness = (row) => row.active * 1e6 + row.waiting + row.failed + row.completed;

export function view(data, ctx) {
  const { list, names, find, queue, state } = data;
  if (!names.length) return [h("h1", {}, "Jobs"), noQueues()];
  const select = (label, value, options, name) =>
    h(
      "select",
      { "aria-label": label, value, onchange: (event) => ctx.go({ [name]: event.currentTarget.value }) },
      options.map(([option, word]) => h("option", { value: option, selected: option === value }, word)),
    );
  return [
    h(
      "div",
      { class: "head" },
      h("h1", {}, "Jobs"),
      h(
        "div",
        { class: "actions" },
        h("input", {
          type: "search",
          placeholder: "Id, name, data, error",
          "aria-label": "Search jobs",
          value: find,
          oninput: (event) => typed(ctx, { find: event.currentTarget.value.trim() }),
        }),
        select("Queue", queue, [["", "all queues"], ...names.map((name) => [name, name])], "queue"),
        select("State", state, [["", "any state"], ...CHOICES.map((word) => [word, STATES[word].word])], "state"),
        h("a", { href: "#/failures", class: "button" }, "Failures by error"),
      ),
    ),
    list.length ? jobTable(list, { withQueue: true, act: (job) => job.state === "failed" && retryButton(job, "list", ctx) }) : nothing(data),
    list.length > 0 &&
      h(
        "p",
        { class: "quiet" },
        counted(data),
        data.partial && ` of the ${MOST_QUEUES} busiest queues; choose a queue to see its own`,
        ".",
      ),
  ];
}

// Each queue was asked for as many as are shown: where there are that many, there may be any number.
const counted = ({ find, list }) =>
  !find
    ? `The newest ${exactCount(list.length)}`
    : list.length < SHOWN
      ? `${exactCount(list.length)} found`
      : `The newest ${SHOWN} that match`;

const nothing = ({ find }) =>
  find
    ? notice(
        `Nothing matches “${find}”`,
        h("p", {}, "No job has this id, and none of the newest ones has it in its name, data or error. "),
        h("p", { class: "quiet" }, "The page of a queue can search older jobs."),
      )
    : notice("No such jobs", h("p", {}, "No job is in this state now."));
