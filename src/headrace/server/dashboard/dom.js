// Building and patching the page.
//
// A view is a pure function that returns new nodes; `show` changes the old nodes until they look like the new ones,
// so focus, selection, scroll position and opened <details> survive every update.
// Rules: no innerHTML and no style attributes (the content security policy forbids the latter); text is text.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "line", "rect", "text", "circle", "title", "polyline"]);
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** h("a", {class: "x", href, onclick: fn, key: "id"}, ...children): nulls and false are left out. */
export function h(tag, props, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  node.own = {};
  for (const [name, value] of Object.entries(props ?? {})) set(node, name, value);
  node.append(...children.flat(Infinity).filter(present).map(asNode));
  return node;
}

const present = (child) => child !== null && child !== undefined && child !== false;
const asNode = (child) => (child instanceof Node ? child : document.createTextNode(String(child)));

function set(node, name, value) {
  if (name === "key") node.key = value;
  else if (name.startsWith("on")) listen(node, name.slice(2), value);
  else if (name === "value" || name === "checked") node[name] = node.own[name] = value;
  else if (value === true) node.setAttribute(name, "");
  else if (present(value)) node.setAttribute(name, value);
}

// One listener per node and type, which asks the node for its present handler: patching only swaps the handler.
function listen(node, type, handler) {
  if (!handler) return;
  node.handlers ??= {};
  if (!node.handlers[type]) node.addEventListener(type, (event) => node.handlers[type]?.(event));
  node.handlers[type] = handler;
}

/** Make the children of `target` look like `nodes`. */
export function show(target, ...nodes) {
  const focused = document.activeElement;
  patchChildren(target, nodes.flat(Infinity).filter(present).map(asNode));
  // A row that moved to another place was out of the document for a moment.
  if (focused !== document.activeElement && target.contains(focused)) focused.focus({ preventScroll: true });
}

function patchChildren(parent, wanted) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.key !== undefined) keyed.set(child.key, child);
  let here = parent.firstChild;
  for (const next of wanted) {
    const match = next.key === undefined ? firstAlike(here, next) : keyed.get(next.key);
    if (!match || !isAlike(match, next)) {
      parent.insertBefore(next, here);
      continue;
    }
    // What lies between is gone, or has a key and will be put back where it belongs.
    while (next.key === undefined && here !== match) here = leave(here);
    if (match === here) here = here.nextSibling;
    else parent.insertBefore(match, here);
    patch(match, next);
  }
  while (here) here = leave(here);
}

function leave(node) {
  const following = node.nextSibling;
  node.remove();
  return following;
}

function firstAlike(from, next) {
  let at = from;
  while (at && !isAlike(at, next)) at = at.nextSibling;
  return at;
}

// The first word of the class says what a node is, the others how it is doing.
const kindOf = (node) =>
  node.nodeType === Node.ELEMENT_NODE ? (node.getAttribute("class") ?? "").split(" ", 1)[0] : "";
const isAlike = (a, b) =>
  a.nodeName === b.nodeName && a.key === b.key && (a.key !== undefined || kindOf(a) === kindOf(b));

function patch(old, next) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) {
      old.data = next.data;
      flash(old.parentElement);
    }
    return;
  }
  for (const { name } of [...old.attributes])
    if (!next.hasAttribute(name) && !isUserOwned(old, name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const type of Object.keys(old.handlers ?? {})) if (!next.handlers?.[type]) old.handlers[type] = null;
  for (const [type, handler] of Object.entries(next.handlers ?? {})) listen(old, type, handler);
  for (const [name, value] of Object.entries(next.own))
    if (old[name] !== value && old !== document.activeElement) old[name] = value;
  if (!next.hasAttribute("data-keep")) patchChildren(old, [...next.childNodes]);
}

const isUserOwned = (node, name) => name === "open" && (node.nodeName === "DETAILS" || node.nodeName === "DIALOG");

function flash(element) {
  if (!element?.hasAttribute("data-live") || still.matches) return;
  element.animate([{ opacity: 0.35 }, { opacity: 1 }], { duration: 150 });
}

/** Call `work` once, in the next frame, however often it was asked for. */
export function oncePerFrame(work) {
  let asked = 0;
  return () => {
    asked ||= requestAnimationFrame(() => {
      asked = 0;
      work();
    });
  };
}
