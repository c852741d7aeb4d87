// What happens on the server while the page is open.
//
// The stream says which queues changed (`queue:counts`, collected by the server, ten times a second at most); the page
// asks for its numbers again, at most once per REFRESH_MS, and every IDLE_MS when nothing happens. The stream is read
// with fetch because EventSource cannot send an Authorization header. A hidden page asks for nothing.

import { BASE, authorization, listenToAnswers, overview } from "./api.js";

const REFRESH_MS = 1000;
const IDLE_MS = 5000;
const RETRY_MS = 1000;

export const connection = { lost: false, lastGood: Date.now(), skew: 0 };

/** The server's clock. */
export const now = () => Date.now() + connection.skew;

let onChange = () => {};
let onConnection = () => {};
let dirty = false;
let refreshed = 0;
let probing = false;
let stream = null;

/** `change()` is called when the page should ask again, `connectionChanged()` when the server went or came back. */
export function start(change, connectionChanged) {
  onChange = change;
  onConnection = connectionChanged;
  listenToAnswers(answered, lost);
  setInterval(tick, 250);
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : refresh()));
}

function tick() {
  if (document.hidden) return;
  const passed = Date.now() - refreshed;
  if (connection.lost) {
    if (passed >= 2 * REFRESH_MS) probe();
  } else if (passed >= IDLE_MS || (dirty && passed >= REFRESH_MS)) refresh();
}

function refresh() {
  dirty = false;
  refreshed = Date.now();
  onChange();
}

// One at a time: questions to a server that hangs would use up the browser's connections.
function probe() {
  if (probing) return;
  probing = true;
  refreshed = Date.now();
  overview()
    .then(refresh, () => {})
    .finally(() => (probing = false));
}

function answered(serverTime, letIn) {
  if (letIn) connect();
  else disconnect();
  if (serverTime) connection.skew = serverTime - Date.now();
  if (Math.abs(connection.skew) < 500) connection.skew = 0; // that much is the way of the answer, not the clock
  connection.lastGood = Date.now();
  if (!connection.lost) return;
  connection.lost = false;
  onConnection();
}

function lost() {
  if (connection.lost) return;
  connection.lost = true;
  onConnection();
}

// -- the stream --------------------------------------------------------------------------------------------------

/** Leave the stream; the next answer opens a new one, with the token of that time. */
export function disconnect() {
  stream?.abort();
  stream = null;
}

async function connect() {
  if (stream || document.hidden) return;
  const mine = (stream = new AbortController());
  while (stream === mine) {
    const rest = await read(mine.signal).catch(() => RETRY_MS);
    if (stream !== mine) return;
    dirty = true; // whatever ended the stream, the next question tells whether the server is still there
    await new Promise((resolve) => setTimeout(resolve, rest));
  }
}

/** Reads until the stream ends; how long to rest before the next one. */
async function read(signal) {
  const response = await fetch(`${BASE}/events?events=queue:counts`, { headers: authorization(), signal, cache: "no-store" });
  if (!response.ok) return 10 * RETRY_MS;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return RETRY_MS;
    if (value.includes("event:")) dirty = true;
  }
}
