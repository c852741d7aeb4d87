// A value as a tree that folds: objects and lists open and close, long texts wrap.
// It is drawn anew with every change, so it shows a bounded part of a large value; the raw view has all of it.

import { h } from "./dom.js";
import { excerpt, exactCount } from "./format.js";

const OPEN_DEPTH = 2;
const MOST = 100;
const MOST_DEPTH = 20;
const MOST_NODES = 2000;

export function tree(value, name = null, depth = 0, room = { left: MOST_NODES }) {
  room.left -= 1;
  if (value === null || typeof value !== "object") return h("div", { class: "leaf" }, label(name), scalar(value));
  if (depth > MOST_DEPTH || room.left <= 0)
    return h("div", { class: "leaf" }, label(name), h("span", { class: "quiet" }, "see raw"));
  const entries = Object.entries(value);
  const kind = Array.isArray(value)
    ? `${exactCount(entries.length)} ${entries.length === 1 ? "item" : "items"}`
    : entries.length
      ? excerpt(value, 60)
      : "empty";
  if (!entries.length)
    return h("div", { class: "leaf" }, label(name), h("span", { class: "quiet" }, Array.isArray(value) ? "[]" : "{}"));
  return h(
    "details",
    { open: depth < OPEN_DEPTH },
    h(
      "summary",
      {},
      label(name),
      h(
        "span",
        { class: "quiet" },
        Array.isArray(value) || name !== null
          ? kind
          : `${exactCount(entries.length)} ${entries.length === 1 ? "field" : "fields"}`,
      ),
    ),
    entries.slice(0, MOST).map(([key, child]) => tree(child, key, depth + 1, room)),
    entries.length > MOST &&
      h("div", { class: "leaf quiet" }, `and ${exactCount(entries.length - MOST)} more; see raw`),
  );
}

const label = (name) => name !== null && h("span", { class: "label" }, `${name}: `);

function scalar(value) {
  if (typeof value === "string") return h("span", { class: "text" }, JSON.stringify(value));
  return h("span", { class: "plain" }, value === undefined ? "none" : String(value));
}
