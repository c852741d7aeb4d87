// Shows /openapi.json as a page to read. Everything on it comes from there; text is set as text, never as HTML.

const METHODS = ["get", "post", "put", "delete"];

const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
};

/** Text with `names` in it as code. */
const prose = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));

const response = await fetch(new URL("../openapi.json", import.meta.url));
const api = await response.json();
const schemas = api.components.schemas;
show();
document.getElementById("find").addEventListener("input", (event) => filter(event.target.value));

function show() {
  const groups = new Map();
  for (const [path, operations] of Object.entries(api.paths))
    for (const method of METHODS.filter((word) => operations[word])) {
      const operation = operations[method];
      const tag = operation.tags?.[0] ?? "Other";
      groups.set(tag, [...(groups.get(tag) ?? []), section(method, path, operation)]);
    }
  const names = [...groups.keys()].sort();
  document.getElementById("operations").replaceChildren(
    ...names.map((name) => make("section", { id: name }, make("h2", {}, name), ...groups.get(name))),
  );
  document.getElementById("contents").replaceChildren(...names.map((name) => make("a", { href: `#${name}` }, name)));
}

function section(method, path, operation) {
  const words = `${method} ${path} ${operation.operationId ?? ""} ${operation.summary}`.toLowerCase();
  const summary = make(
    "summary",
    {},
    make("span", { class: `method ${method}` }, method.toUpperCase()),
    make("code", {}, path),
    make("span", { class: "what" }, ...prose(operation.summary)),
  );
  const details = make("details", { "data-words": words }, summary);
  details.addEventListener("toggle", () => details.childElementCount === 1 && details.append(...body(operation)));
  return details;
}

function* body(operation) {
  if (operation.description) yield make("p", {}, ...prose(operation.description));
  if (operation.parameters?.length) {
    yield make("h3", {}, "Parameters");
    yield table(operation.parameters.map((item) => [`${item.name} (${item.in})`, item.schema, item.required]));
  }
  const sent = operation.requestBody?.content["application/json"].schema;
  if (sent) yield* schemaTable("Body", sent);
  const answer = operation.responses["200"]?.content?.["application/json"]?.schema;
  if (answer) yield* schemaTable("Answer", answer);
  if (operation["x-errors"]) {
    yield make("h3", {}, "Errors");
    yield make("ul", {}, ...operation["x-errors"].map((text) => make("li", {}, make("code", {}, text))));
  }
}

function* schemaTable(title, schema) {
  yield make("h3", {}, title);
  const object = resolved(schema);
  const properties = Object.entries(object.properties ?? {});
  if (object.description) yield make("p", {}, ...prose(object.description));
  if (properties.length === 0) yield make("p", {}, typeText(schema));
  else yield table(properties.map(([name, type]) => [name, type, object.required?.includes(name)]));
}

function resolved(schema) {
  if (schema.$ref) return resolved(schemas[schema.$ref.split("/").pop()]);
  if (schema.anyOf) return resolved(schema.anyOf[0]);
  if (schema.allOf) return { properties: Object.assign({}, ...schema.allOf.map((part) => resolved(part).properties)) };
  return schema;
}

function table(rows) {
  const head = make("tr", {}, ...["name", "type", "limits", ""].map((text) => make("th", {}, text)));
  const lines = rows.map(([name, schema, required]) =>
    make("tr", {}, make("td", {}, make("code", {}, name)), make("td", {}, typeText(schema)),
      make("td", {}, limits(schema)), make("td", {}, required ? "required" : defaultText(schema))));
  return make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), make("tbody", {}, ...lines)));
}

function typeText(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeText).join(" or ");
  if (schema.enum) return schema.enum.join(" | ");
  if (schema.type === "array") return `list of ${typeText(schema.items)}`;
  return schema.type ?? "any";
}

function limits(schema) {
  const parts = [];
  for (const member of schema.anyOf ?? [schema]) {
    if (member.minimum !== undefined || member.maximum !== undefined)
      parts.push(`${member.minimum ?? ""} to ${member.maximum ?? ""}`);
    if (member.maxLength !== undefined) parts.push(`up to ${member.maxLength} characters`);
  }
  return parts.join(", ");
}

const defaultText = (schema) => (schema.default === undefined ? "" : `default ${JSON.stringify(schema.default)}`);

function filter(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  for (const group of document.querySelectorAll("main > section")) {
    let shown = 0;
    for (const item of group.querySelectorAll("details")) {
      item.hidden = !words.every((word) => item.dataset.words.includes(word));
      shown += item.hidden ? 0 : 1;
    }
    group.hidden = shown === 0;
  }
}
