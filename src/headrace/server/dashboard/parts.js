// Pieces that several pages share: states, ages, tables of jobs, empty and error notices, dialogs and toasts.

import { BASE, token, withQuery } from "./api.js";
import { h, show } from "./dom.js";
import { age, count, exactTime, excerpt, firstLine, isoTime, nameOf } from "./format.js";
import { now } from "./live.js";

// Never colour alone: each state has a glyph and a word.
export const STATES = {
  waiting: { glyph: "◔", word: "waiting" },
  prioritized: { glyph: "◔", word: "waiting" },
  delayed: { glyph: "◷", word: "delayed" },
  active: { glyph: "▶", word: "active" },
  completed: { glyph: "✓", word: "completed" },
  failed: { glyph: "✕", word: "failed" },
  "waiting-children": { glyph: "⋯", word: "waiting for children" },
  paused: { glyph: "‖", word: "paused" },
  unknown: { glyph: "?", word: "removed" },
};

export function badge(state, word) {
  const known = STATES[state] ?? STATES.unknown;
  const kind = state === "prioritized" || state === "waiting-children" ? "waiting" : STATES[state] ? state : "paused";
  return h(
    "span",
    { class: `state ${kind}` },
    h("span", { class: "glyph", "aria-hidden": "true" }, known.glyph),
    word ?? known.word,
  );
}

export const when = (time) =>
  h("time", { title: exactTime(time), datetime: isoTime(time) }, age(time, now()));

export const link = (to, ...content) => h("a", { href: to }, ...content);
export const queueLink = (name) => h("a", { href: paths.queue(name), class: "name", title: name }, name);

export const paths = {
  queue: (name, query = {}) => withQuery(`#/queue/${encodeURIComponent(name)}`, query),
  job: (id) => `#/job/${encodeURIComponent(id)}`,
  jobs: (query = {}) => withQuery("#/jobs", query),
};

/** What `ask` gave for this stamp, while that is younger than `ms`; else what it gives now, kept in `ui` by its name. */
export async function fresh(ui, name, ms, stamp, ask) {
  const kept = ui[name];
  if (kept && kept.stamp === stamp && Date.now() - kept.at < ms) return kept.data;
  const data = await ask();
  ui[name] = { stamp, at: Date.now(), data };
  return data;
}

/** Change the address as soon as nothing more is typed. */
export function typed(ctx, change) {
  clearTimeout(ctx.ui.typing);
  ctx.ui.typing = setTimeout(() => ctx.go(change), 250);
}

/** A section with a heading and, at its right, what one can do. */
export const section = (title, actions, ...body) =>
  h("section", {}, h("div", { class: "head" }, h("h2", {}, title), h("div", { class: "actions" }, actions)), ...body);

/** Figures side by side, each below its name. */
export const factList = (facts) =>
  h(
    "dl",
    { class: "facts" },
    facts.map(([word, value]) => h("div", {}, h("dt", {}, word), h("dd", {}, value))),
  );

export const notice = (title, ...body) => h("div", { class: "notice" }, h("h2", {}, title), ...body);

/** A request that a person can paste into a shell: it goes where this page came from, which always works. */
export const curl = (path, body) =>
  h(
    "pre",
    { class: "code" },
    `curl ${location.origin}${BASE}${path} \\\n`,
    token.get() && `  -H "Authorization: Bearer $HEADRACE_TOKEN" \\\n`,
    "  -H 'Content-Type: application/json' \\\n",
    `  -d '${body}'`,
  );

/** The lines that fill an empty queue. */
export const firstJob = (queue) =>
  curl(`/queues/${encodeURIComponent(queue)}/jobs`, '{"name": "welcome", "data": {"to": "ada@example.com"}}');

export const problem = (error) =>
  (
    ({
      missing: () =>
        notice("Not found", h("p", {}, `${error.message}. It may have been removed since the link was made.`)),
      forbidden: () =>
        notice("No permission", h("p", {}, "The server does not let this page read that. ", error.message)),
      lost: () => notice("No answer yet", h("p", {}, "The page fills itself as soon as the server answers.")),
    })[error.kind] ?? (() => notice("That did not work", h("p", {}, error.message)))
  )();

/** Rows that a person recognises: name, excerpt, age, attempt, error; the id is for copying. */
export function jobTable(jobs, { withQueue = false, act } = {}) {
  return h(
    "table",
    { class: "jobs cards" },
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        h("th", {}, "Job"),
        withQueue && h("th", {}, "Queue"),
        h("th", {}, "State"),
        h("th", { class: "n" }, "Attempt"),
        h("th", { class: "n" }, "Created"),
        act && h("th", { class: "act" }, h("span", { class: "hidden" }, "Actions")),
      ),
    ),
    h(
      "tbody",
      {},
      jobs.map((job) =>
        h(
          "tr",
          { key: job.id, "data-row": true },
          h(
            "td",
            { class: "main" },
            h("a", { href: paths.job(job.id), class: "name", "data-open": true, title: nameOf(job) }, nameOf(job)),
            job.priority ? h("span", { class: "tag" }, `priority ${job.priority}`) : null,
            h("div", { class: "excerpt" }, job.failedReason ? firstLine(job.failedReason) : excerpt(job.data)),
          ),
          withQueue && h("td", { "data-label": "Queue" }, queueLink(job.queue)),
          h("td", { "data-label": "State" }, stateOfJob(job)),
          h("td", { class: "n", "data-label": "Attempt" }, attempt(job)),
          h("td", { class: "n", "data-label": "Created" }, when(job.createdAt)),
          act && h("td", { class: "act" }, act(job)),
        ),
      ),
    ),
  );
}

function stateOfJob(job) {
  if (job.state === "delayed") return [badge("delayed"), h("span", { class: "quiet" }, " ", when(job.runAt))];
  if (job.state === "active" && job.progress > 0)
    return [badge("active"), h("span", { class: "quiet" }, ` ${Math.round(job.progress)} %`)];
  return badge(job.state ?? "unknown");
}

// `attempts` counts those that failed: unless that was the last one, the present or next one is one more.
export const attempt = (job) => `${job.attempts + (job.state === "failed" ? 0 : 1)}/${job.maxAttempts}`;

// -- talking to the person --------------------------------------------------------------------------------------

export function toast(text, kind = "done") {
  const node = h("div", { class: `toast ${kind}` }, text);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), kind === "bad" ? 8000 : 4000);
}

/** What `work` gives; null when it failed, after saying why. */
export async function attempted(work) {
  try {
    return await work();
  } catch (error) {
    toast(error.message, "bad");
    return null;
  }
}

/** Run an action, say what it did or why it failed. */
export async function perform(work, told) {
  const done = await attempted(async () => ({ result: await work() }));
  if (done) toast(typeof told === "function" ? told(done.result) : told);
  return done !== null;
}

/** Ask once, in the words of what will happen. Resolves to whether it was confirmed. */
export function confirm(question, verb, detail) {
  return dialog((close) => [
    h("h2", {}, question),
    detail && h("p", { class: "quiet" }, detail),
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", onclick: () => close(false), autofocus: true }, "Keep"),
      h("button", { type: "button", class: "danger", onclick: () => close(true) }, verb),
    ),
  ]);
}

export function dialog(content) {
  return new Promise((resolve) => {
    const box = h("dialog", {});
    box.addEventListener("close", () => {
      box.remove();
      resolve(box.answer ?? false);
    });
    const close = (answer) => {
      box.answer = answer;
      box.close();
    };
    show(box, content(close));
    document.body.append(box);
    box.showModal();
  });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without https the clipboard is closed to scripts; a selected field still works.
    const field = document.body.appendChild(h("textarea", { value: text, class: "hidden" }));
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  toast("Copied");
}

export const copyButton = (text, label = "Copy") =>
  h("button", { type: "button", class: "small", onclick: () => copy(text()) }, label);

/** Numbers that change under one's eyes. */
export const live = (value, format = count) => h("span", { "data-live": true }, format(value));
