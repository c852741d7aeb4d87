// The frame around all pages: navigation, routes, keyboard, theme, login, and the loop of load and draw.
//
// A page is a module with `title(params)`, `load(ctx)` and `view(data, ctx)`; ctx has the parameters of the address,
// `ui` (state of the page that lives as long as the address), `redraw()` and `reload()`. To add a page: write its
// module and add a line to PAGES.

import { ApiError, hasReport, openReport, overview, token, withQuery } from "./api.js";
import { h, oncePerFrame, show } from "./dom.js";
import { clockTime } from "./format.js";
import * as live from "./live.js";
import * as login from "./login.js";
import { attempted, dialog, paths, problem } from "./parts.js";

// Fetched when they are first opened: the first paint needs one of them only.
const PAGES = {
  "": () => import("./overview.js"),
  queues: () => import("./queues.js"),
  queue: () => import("./queue.js"),
  jobs: () => import("./jobs.js"),
  job: () => import("./job.js"),
  failures: () => import("./dlq.js"),
  workflows: () => import("./workflows.js"),
  schedules: () => import("./schedules.js"),
  workers: () => import("./workers.js"),
};
const NAV = [
  ["", "Overview", "o"],
  ["queues", "Queues", "q"],
  ["jobs", "Jobs", "j"],
  ["workflows", "Workflows", "w"],
  ["schedules", "Schedules", "s"],
];
const BELONGS = { queue: "queues", job: "jobs", failures: "jobs" };

const content = document.getElementById("content");
const bar = document.getElementById("bar");
const lost = document.getElementById("lost");

let ctx = null;
let loading = false;
let again = false;

// -- routes ------------------------------------------------------------------------------------------------------

function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return {
    name: Object.hasOwn(PAGES, name) ? name : "",
    id: decoded(rest.join("/")),
    query: Object.fromEntries(new URLSearchParams(query)),
  };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // typed by hand, with a bare percent sign
  }
}

function open() {
  const next = route();
  const address = `${next.name}/${next.id}`;
  const same = ctx?.address === address;
  ctx = {
    ...next,
    address,
    error: null,
    login: ctx?.login ?? false,
    refused: ctx?.refused ?? null,
    page: same ? ctx.page : null,
    ui: same ? ctx.ui : {},
    data: same ? ctx.data : null,
    redraw: draw,
    reload: load,
    go: (change) => location.replace(pathWith(change)),
  };
  if (!same) {
    show(content, h("p", { class: "quiet loading" }, "Loading…"));
    scrollTo(0, 0);
  }
  drawBar();
  load();
}

// Changes the query of the present address without leaving a page behind for the back button.
const pathWith = (change) => withQuery(location.hash.split("?")[0] || "#/", { ...ctx.query, ...change });

async function load() {
  if (ctx.leaving) return;
  if (loading) {
    again = true;
    return;
  }
  loading = true;
  const mine = ctx;
  try {
    mine.page ??= await fetchPage(mine);
    mine.data = await mine.page.load(mine);
    mine.error = null;
    mine.login = false;
    mine.refused = null;
    lookForReport();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    mine.error = error;
    considerLogin(mine, error);
  } finally {
    loading = false;
    draw();
    if (again) {
      again = false;
      load();
    }
  }
}

function considerLogin(mine, error) {
  if (error.kind === "login") {
    if (token.get() !== null) mine.refused = "The server did not accept this token.";
    token.clear();
    mine.login = true;
  } else if (mine.login) {
    // While somebody signs in, other refusals (too many guesses) belong into the form, too.
    mine.refused = error.message;
    mine.login = error.kind === "refused";
  }
  drawBar();
}

// A browser never asks again for a module that it did not get: only reloading helps, as soon as somebody answers.
const fetchPage = (mine) =>
  PAGES[mine.name]().catch(() => {
    mine.unfetched = true;
    throw new ApiError("lost", "The server does not answer.");
  });

const reloadIfAnswered = () =>
  overview().then(
    () => location.reload(),
    () => {},
  );

// -- drawing -----------------------------------------------------------------------------------------------------

const draw = oncePerFrame(() => {
  ctx.width = content.clientWidth - parseFloat(getComputedStyle(content).paddingLeft) * 2;
  document.documentElement.classList.toggle("login", ctx.login);
  if (ctx.login) draws("Sign in", login.view(ctx, signedIn));
  else if (ctx.data && (!ctx.error || ctx.error.kind === "lost"))
    draws(ctx.page.title(ctx), ctx.page.view(ctx.data, ctx));
  else if (ctx.error) {
    const told = problem(ctx.error);
    draws(told.querySelector("h2").textContent, told);
  }
});

function draws(title, view) {
  show(content, view);
  document.title = `${title} · Headrace`;
}

async function signedIn() {
  live.disconnect();
  await load();
  drawBar();
  // What was refused is replaced by what is typed next.
  if (ctx.login) content.querySelector("input").select();
}

let isReported = null;

// Once, and not before the server has let us in.
async function lookForReport() {
  if (isReported !== null) return;
  isReported = false;
  isReported = await hasReport();
  if (isReported) drawBar();
}

const place = (name, word, here) =>
  h("a", { href: `#/${name}`, "data-word": word, "aria-current": here === name ? "page" : null }, word);

function drawBar() {
  const here = BELONGS[ctx.name] ?? ctx.name;
  show(
    bar,
    h("a", { class: "brand", href: "#/", "aria-label": "Headrace, overview" }, mark(), h("span", {}, "headrace")),
    h(
      "nav",
      { "aria-label": "Places" },
      NAV.map(([name, word]) => place(name, word, here)),
    ),
    h(
      "form",
      { class: "search", role: "search", onsubmit: search },
      h("input", {
        id: "search",
        type: "search",
        placeholder: "Find a job by id or text",
        "aria-label": "Find a job by id or text",
        autocomplete: "off",
      }),
      h("kbd", { "aria-hidden": "true" }, "/"),
    ),
    h(
      "div",
      { class: "corner" },
      place("workers", "Workers", here),
      isReported && h("a", { href: "report", target: "_blank", onclick: (event) => attempted(() => openReport(event)) }, "Report"),
      h(
        "button",
        {
          type: "button",
          class: "icon",
          id: "theme",
          title: "Switch between light and dark",
          "aria-label": "Switch between light and dark",
          onclick: switchTheme,
        },
        "◐",
      ),
      h(
        "button",
        { type: "button", class: "icon wide", title: "Keys (?)", "aria-label": "Keyboard help", onclick: help },
        "?",
      ),
      token.get() && h("button", { type: "button", class: "small", onclick: signOut }, "Sign out"),
    ),
  );
}

const mark = () =>
  h(
    "svg",
    { viewBox: "0 0 16 16", width: 20, height: 20, "aria-hidden": "true" },
    h("path", {
      class: "mark",
      d: "M1.5 5.2c2.2 0 2.2 1.8 4.4 1.8s2.2-1.8 4.4-1.8 1.9 1 4.2 1M1.5 10.4c2.2 0 2.2 1.8 4.4 1.8s2.2-1.8 4.4-1.8 1.9 1 4.2 1",
    }),
  );

function search(event) {
  event.preventDefault();
  const text = event.currentTarget.querySelector("input").value.trim();
  location.hash = paths.jobs({ find: text });
}

function signOut() {
  token.clear();
  live.disconnect();
  open();
}

function drawConnection() {
  const gone = live.connection.lost && !ctx.login;
  document.documentElement.classList.toggle("is-lost", gone);
  lost.hidden = !gone;
  if (gone)
    show(
      lost,
      `No connection to the server. What you see is from ${clockTime(live.connection.lastGood, true)}; trying again.`,
    );
}

// -- theme -------------------------------------------------------------------------------------------------------

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";

function switchTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  localStorage.setItem("headrace.theme", document.documentElement.dataset.theme);
}

// -- keyboard ----------------------------------------------------------------------------------------------------

const KEYS = [
  ["/", "search"],
  ["g o", "overview"],
  ["g q", "queues"],
  ["g j", "jobs"],
  ["g f", "failures"],
  ["g w", "workflows"],
  ["g s", "schedules"],
  ["j  k", "next and previous row"],
  ["Enter", "open the row"],
  ["r", "retry the row or the job"],
  ["?", "this list"],
];
let afterG = 0;

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") document.activeElement.blur();
  if (event.target.closest("input, textarea, select")) return;
  const follows = Date.now() - afterG < 1200;
  afterG = event.key === "g" ? Date.now() : 0;
  const places = Object.fromEntries([...NAV.map(([name, , key]) => [key, name]), ["f", "failures"]]);
  if (follows && event.key in places) location.hash = `#/${places[event.key]}`;
  else if (event.key === "/") focusSearch();
  else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
  else if (event.key === "r") retry();
  else if (event.key === "?") help();
  else return;
  event.preventDefault();
}

const focusSearch = () =>
  (document.querySelector("#content input[type=search]") ?? document.getElementById("search")).focus();

function step(by) {
  const rows = [...content.querySelectorAll("[data-row] [data-open]")];
  const here = rows.indexOf(document.activeElement?.closest("[data-row]")?.querySelector("[data-open]"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, here < 0 ? 0 : here + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

function retry() {
  const row = document.activeElement?.closest("[data-row]");
  (row ?? content).querySelector(row ? "[data-retry]" : "[data-retry-page]")?.click();
}

function help() {
  dialog((close) => [
    h("h2", {}, "Keys"),
    h(
      "dl",
      { class: "keys" },
      KEYS.map(([keys, what]) => [
        h(
          "dt",
          {},
          keys
            .split(" ")
            .filter(Boolean)
            .map((key) => h("kbd", {}, key)),
        ),
        h("dd", {}, what),
      ]),
    ),
    h("p", { class: "quiet" }, "The API behind this page: ", h("a", { href: "docs" }, "reference")),
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", autofocus: true, onclick: () => close(true) }, "Close"),
    ),
  ]);
}

// -- start -------------------------------------------------------------------------------------------------------

const chosenTheme = localStorage.getItem("headrace.theme");
if (chosenTheme) document.documentElement.dataset.theme = chosenTheme;
addEventListener("hashchange", open);
addEventListener("keydown", onKey);
addEventListener("resize", () => draw());
open();
live.start(
  () => (ctx.unfetched ? reloadIfAnswered() : ctx.login || ctx.page?.still ? drawConnection() : load()),
  () => {
    drawConnection();
    draw();
  },
);
// Ages grow by themselves; one quiet frame a second keeps them true.
setInterval(() => {
  if (document.hidden) return;
  drawConnection();
  if (ctx.data && !ctx.login) draw();
}, 1000);
