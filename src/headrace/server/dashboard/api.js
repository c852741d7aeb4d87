// The one place that knows the server's routes and the shape of its answers.
//
// Everything a view uses comes from here in the dashboard's own words, so a change of shape touches this file only.
// Errors are ApiError with a `kind`: "login" (401), "forbidden" (403), "missing" (404), "refused" (other 4xx),
// "lost" (no answer, or 5xx of a proxy in between).

const TOKEN = "headrace.token";

/** Where the server's routes begin: this file is below it. Usually "/", else where an application has mounted it. */
export const BASE = new URL("..", import.meta.url).pathname.replace(/\/$/, "");
const MOST_QUEUES = 2000;
const PATIENCE_MS = 10_000;
const MOST_IDS = 1000;

export class ApiError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN),
  set: (value) => sessionStorage.setItem(TOKEN, value),
  clear: () => sessionStorage.removeItem(TOKEN),
};

// What a listener (live.js) wants to know of every answer: that the server is there, its clock, whether it lets us in.
const heard = { onAnswer: () => {}, onLost: () => {} };
export const listenToAnswers = (onAnswer, onLost) => Object.assign(heard, { onAnswer, onLost });

// A header holds bytes: letters beyond Latin-1, which fetch would refuse, go as UTF-8.
const asBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

export function authorization() {
  const value = token.get();
  return value ? { Authorization: `Bearer ${asBytes(value)}` } : {};
}

/** Whether `headrace serve --report` has a report to show. */
export async function hasReport() {
  const answer = await fetch(`${BASE}/report`, { method: "HEAD", headers: authorization() }).catch(() => null);
  return answer?.status === 200;
}

/** A link carries no token: where one is needed, the report is fetched with it and saved as a file. */
export async function openReport(event) {
  if (!token.get()) return;
  event.preventDefault();
  const answer = await fetch(`${BASE}/report`, { headers: authorization() }).catch(() => null);
  if (answer?.status !== 200) throw new ApiError("lost", "The server does not give the report.");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await answer.blob());
  link.download = "headrace-report.html";
  link.click();
  URL.revokeObjectURL(link.href);
}

const KINDS = { 401: "login", 403: "forbidden", 404: "missing" };
// What says why is the server itself: it is there, even if it cannot do what it was asked for.
const kindOf = (status, error) => KINDS[status] ?? (status >= 500 && error === undefined ? "lost" : "refused");

async function call(method, path, body) {
  const headers = authorization();
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  let answer = {};
  try {
    response = await fetch(BASE + path, {
      method,
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      // A server that hangs looks like one that is gone. What changes something may take its time.
      signal: method === "GET" ? AbortSignal.timeout(PATIENCE_MS) : null,
    });
    answer = await response.json();
  } catch (error) {
    // The error page of a proxy is no JSON, and its status says enough.
    if (!(error instanceof SyntaxError) || response.ok) {
      heard.onLost();
      throw new ApiError("lost", "The server does not answer.");
    }
  }
  if (!response.ok || answer.ok === false) {
    const kind = response.ok ? "refused" : kindOf(response.status, answer.error);
    if (kind === "lost") heard.onLost();
    else heard.onAnswer(null, kind !== "login");
    throw new ApiError(kind, answer.error ?? `The server answered ${response.status}.`);
  }
  heard.onAnswer(answer.timestamp, true);
  return answer;
}

/** A path with what is given of the query. */
export function withQuery(path, query) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

const get = (path, query = {}) => call("GET", withQuery(path, query));
const post = (path, body = {}) => call("POST", path, body);
const q = (queue) => `/queues/${encodeURIComponent(queue)}`;
const j = (id) => `/jobs/${encodeURIComponent(id)}`;

/** Whether a path can name this queue: browsers resolve dots, escaped or not, before they ask. */
export const hasPath = (queue) => queue !== "." && queue !== "..";

// -- looking ---------------------------------------------------------------------------------------------------

/** {stats, metrics, workers: {stats, list}, crons, storage, queues, totalQueues}; queues has those that wait longest. */
export async function overview() {
  const answer = await get("/dashboard");
  return { ...answer, queues: answer.queues.map(queueRow) };
}

/** All queues, page by page. */
export async function queues() {
  const rows = [];
  for (let total = 1; rows.length < total && rows.length < MOST_QUEUES;) {
    const page = await get("/dashboard/queues", { limit: 500, offset: rows.length });
    if (!page.queues.length) break;
    rows.push(...page.queues.map(queueRow));
    total = page.total;
  }
  return rows;
}

const queueRow = (row) => ({
  name: row.name,
  paused: row.paused,
  waiting: row.waiting,
  delayed: row.delayed,
  active: row.active,
  completed: row.completed,
  failed: row.dlq,
  failedToday: row.failedToday,
  limit: row.concurrency,
  oldest: row.oldestWaitingMs,
  in: row.inPerSec,
  out: row.outPerSec,
  p95: row.p95WaitMs,
});

/**
 * {start, step, series: {in, out, failed, waiting, active, waitP50, waitP95, runP95}, queues: Map}, rates per second.
 * `top`: how many of the busiest queues get lines of their own.
 */
export async function history(span, { queue, top = 0 } = {}) {
  const answer = await get("/dashboard/history", { window: span, queue, top });
  return {
    start: answer.start,
    step: answer.step,
    series: answer.series,
    queues: new Map(Object.entries(answer.queues)),
  };
}

/** {groups: [{signature, count, lastSeen, queues, jobIds, error}], total} */
export const failures = (limit = 6) => get("/dashboard/failures", { limit });

/** {name, counts, paused, priorityCounts} */
export const queue = (name) => get(`/dashboard/queues/${encodeURIComponent(name)}`, { brief: true });

export const queueSettings = async (name) => {
  const [stall, dlq, limits] = await Promise.all(
    ["stall-config", "dlq-config", "limits"].map((part) => get(`${q(name)}/${part}`)),
  );
  return { stall: stall.config, dlq: dlq.config, limits: limits.data.limits };
};

// Lists ask for jobs in brief: each payload may be megabytes long, and a row shows its beginning.
export const jobs = async (name, { state, limit = 25, offset = 0, asc = false } = {}) =>
  (await get(`${q(name)}/jobs/list`, { state, limit, offset, asc, brief: true })).jobs;

/** {jobs, examined, cursor}: the newest jobs with the text in them; `cursor` is where to search further, or null. */
export const search = (name, { text, state, limit = 25, cursor } = {}) =>
  get(`${q(name)}/jobs/search`, { text, state, limit, cursor, brief: true });

export const job = async (id) => (await get(j(id))).job;

/** One row of a list, or null when there is no such job. */
export async function jobIfKept(id) {
  if ((await get(`${j(id)}/state`)).state === "unknown") return null; // no error, unlike the job itself
  return (await get(j(id), { brief: true }).catch(() => ({ job: null }))).job;
}

export const logs = async (id) => (await get(`${j(id)}/logs`)).data.logs;

/** The newest dead letters of a queue that holds `total` of them; the server lists the oldest first. */
export async function deadLetters(name, total, most = 100) {
  const { entries } = await get(`${q(name)}/dlq`, { limit: most, offset: Math.max(0, total - most), brief: true });
  return entries.map((entry) => ({ ...entry, queue: name })).reverse();
}

/** What registered workers call themselves, by the id under which they pull. */
export async function workerNames() {
  const { workers } = (await get("/workers")).data;
  const called = ({ name, hostname }) => (hostname && hostname !== "unknown" ? `${name} on ${hostname}` : name);
  return new Map(workers.map((worker) => [worker.id, called(worker)]));
}

export const flows = (limit = 100) => get("/flows", { limit });
/** {flow, steps}: how it stands and its whole log. */
export const flow = (id) => get(`/flows/${encodeURIComponent(id)}`);

/** The schedules that run next: {total, crons: [{name, queue, ..., upcoming: [time], recent: [{at, jobId, state}]}]}. */
export async function crons() {
  const { crons: rows, total } = await get("/dashboard/crons", { limit: 200 });
  return { total, crons: rows.map(({ cron, ...runs }) => ({ ...cron, ...runs })) };
}

// -- acting ----------------------------------------------------------------------------------------------------

export const pause = (name) => post(`${q(name)}/pause`);
export const resume = (name) => post(`${q(name)}/resume`);
export const drain = async (name) => (await post(`${q(name)}/drain`)).count;
export const clean = async (name, state, limit) => (await post(`${q(name)}/clean`, { grace: 0, state, limit })).count;
export const promoteAll = async (name) => (await post(`${q(name)}/promote-jobs`)).count;
export const purge = async (name) => (await post(`${q(name)}/dlq/purge`)).count;
export const retryFailed = async (name, jobId) => (await post(`${q(name)}/dlq/retry`, jobId ? { jobId } : {})).count;
export async function retryMany(name, ids) {
  let done = 0;
  for (let at = 0; at < ids.length; at += MOST_IDS)
    done += (await post(`${q(name)}/dlq/retry`, { ids: ids.slice(at, at + MOST_IDS) })).count;
  return done;
}
export const removeFailed = (name, id) => call("DELETE", `${q(name)}/dlq/${encodeURIComponent(id)}`);
export const retryCompleted = async (name, id) => (await post(`${q(name)}/retry-completed`, { id })).count;
export const setConcurrency = (name, limit) => call("PUT", `${q(name)}/concurrency`, { limit });
export const clearConcurrency = (name) => call("DELETE", `${q(name)}/concurrency`);
export const setRateLimit = (name, limit, duration) => call("PUT", `${q(name)}/rate-limit`, { limit, duration });
export const clearRateLimit = (name) => call("DELETE", `${q(name)}/rate-limit`);
export const cancel = (id) => call("DELETE", j(id));
export const cancelActive = (id) => call("DELETE", `${j(id)}?force=true`);
export const promote = (id) => post(`${j(id)}/promote`);
export const discard = (id) => post(`${j(id)}/discard`);
export const cancelFlow = (id, reason) => post(`/flows/${encodeURIComponent(id)}/cancel`, { reason });
export const signalFlow = (id, name, payload) =>
  post(`/flows/${encodeURIComponent(id)}/signals/${encodeURIComponent(name)}`, { payload });
export const deleteCron = (name) => call("DELETE", `/crons/${encodeURIComponent(name)}`);
