// Shown when the server answers 401. The token stays in this tab (sessionStorage) and goes out as a Bearer header.

import { token } from "./api.js";
import { h } from "./dom.js";

export function view(ctx, signedIn) {
  const { refused } = ctx;
  const enter = (event) => {
    event.preventDefault();
    const value = event.currentTarget.querySelector("input").value.trim();
    if (!value) return;
    token.set(value);
    signedIn();
  };
  return h(
    "form",
    { class: "login-form", onsubmit: enter },
    h("h1", {}, "Sign in"),
    h("p", { class: "quiet" }, "This server asks for a token: one of those it was started with (--auth-tokens)."),
    h(
      "label",
      {},
      "Token",
      h("input", {
        type: "password",
        name: "token",
        autocomplete: "current-password",
        autofocus: true,
        "aria-invalid": refused ? "true" : null,
      }),
    ),
    refused && h("p", { class: "bad", role: "alert" }, refused),
    h("button", { type: "submit", class: "primary" }, "Sign in"),
  );
}
