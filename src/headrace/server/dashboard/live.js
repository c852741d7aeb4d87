// What happens on the server while the page is open.
//
// Events only say that something changed; numbers are asked for again, at most once per REFRESH_MS, and every IDLE_MS
// when nothing happens. The stream is read with fetch because EventSource cannot send an Authorization header.
// A busy server is not made busier: past CALM events in a second the stream is closed for a while and time alone
// drives the page. A hidden page asks for nothing.

import { authorization, listenToAnswers, overview } from "./api.js";

const REFRESH_MS = 1000;
const IDLE_MS = 5000;
const CALM = 400;
const REST_MS = 20_000;

export const connection = { lost: false, lastGood: Date.now(), skew: 0 };

/** The server's clock. */
export const now = () => Date.now() + connection.skew;

let onChange = () => {};
let onConnection = () => {};
let dirty = false;
let refreshed = 0;
let stream = null;

/** `change()` is called when the page should ask again, `connectionChanged()` when the server went or came back. */
export function start(change, connectionChanged) {
  onChange = change;
  onConnection = connectionChanged;
  listenToAnswers(answered, lost);
  setInterval(tick, 250);
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : wake()));
}

/** Forget the stream; the next answer opens a new one, with the token of that time. */
export const reconnect = () => disconnect();

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

const wake = () => refresh();

function probe() {
  refreshed = Date.now();
  overview().then(refresh, () => {});
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

function disconnect() {
  stream?.abort();
  stream = null;
}

async function connect() {
  if (stream || document.hidden) return;
  const mine = (stream = new AbortController());
  let pause = REFRESH_MS;
  while (stream === mine) {
    pause = (await read(mine.signal).catch(() => null)) ?? Math.min(pause * 2, 10 * REFRESH_MS);
    if (stream !== mine) return;
    dirty = true; // whatever ended the stream, the next question tells whether the server is still there
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

/** Reads events until the stream ends; how long to rest before the next one. */
async function read(signal) {
  const own = new AbortController();
  signal.addEventListener("abort", () => own.abort());
  const response = await fetch("/events", { headers: authorization(), signal: own.signal, cache: "no-store" });
  if (!response.ok) return 10 * REFRESH_MS;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let second = 0;
  let events = 0;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return REFRESH_MS;
    const found = value.split("event: job:").length - 1 + (value.split("event: queue:").length - 1);
    if (found) dirty = true;
    const present = Math.floor(Date.now() / 1000);
    events = present === second ? events + found : found;
    second = present;
    if (events > CALM) {
      own.abort();
      return REST_MS;
    }
  }
}
