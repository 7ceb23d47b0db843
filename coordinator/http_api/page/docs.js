// The HTTP reference: each operation of openapi.json, with the fields of its body and answers.

import { openapi } from "./stream.js";

const DEPTH_MAX = 6; // Deeper fields are left out, because a schema may refer to itself.

function node(tag, text, ...children) {
  const made = document.createElement(tag);
  made.append(text, ...children);
  return made;
}

/** Returns the schemas that a value may match. Follows references, and splits alternatives. */
function kinds(schema, whole) {
  if (schema.$ref) return kinds(whole.components.schemas[schema.$ref.split("/").pop()], whole);
  return (schema.anyOf ?? schema.oneOf)?.flatMap((one) => kinds(one, whole)) ?? [schema];
}

function type(schema, whole) {
  const names = kinds(schema, whole).map((one) => {
    if (one.type === "array") return `[${type(one.items ?? {}, whole)}]`;
    return one.const ?? one.enum?.join(" | ") ?? (one.properties ? one.title : one.type) ?? "any";
  });
  return [...new Set(names)].join(" | ");
}

/** Returns a list of the fields of a schema's objects, with the fields of nested objects. */
function fields(schema, whole, depth = 0) {
  const rows = kinds(schema, whole).flatMap((one) => {
    if (one.type === "array") return [fields(one.items ?? {}, whole, depth)];
    return Object.entries(one.properties ?? {}).map(([name, inner]) => {
      const is = one.required?.includes(name) ? " (required)" : "";
      const said = inner.description ? `: ${inner.description}` : "";
      const row = node("li", "", node("code", name), ` ${type(inner, whole)}${is}${said}`);
      if (depth < DEPTH_MAX) row.append(fields(inner, whole, depth + 1));
      return row;
    });
  });
  return node("ul", "", ...rows);
}

function operation(method, path, told, whole) {
  const card = Object.assign(node("section", ""), { className: "card" });
  card.append(node("h2", `${method.toUpperCase()} ${path}`));
  card.append(...(told.description ?? "").split("\n\n").map((text) => node("p", text)));
  const body = told.requestBody?.content["application/json"]?.schema;
  const parts = [["Body", body], ...Object.entries(told.responses).flatMap(([status, one]) =>
    Object.entries(one.content ?? {}).map(([kind, { schema }]) => [`${status}: ${kind}`, schema]))];
  for (const [title, schema] of parts) {
    if (schema) card.append(node("details", "", node("summary", title), fields(schema, whole)));
  }
  return card;
}

const main = document.getElementById("docs");
try {
  const whole = await openapi();
  main.replaceChildren(...Object.entries(whole.paths).flatMap(([path, operations]) =>
    Object.entries(operations).map(([method, told]) => operation(method, path, told, whole))));
} catch (error) {
  const hint = error.status === 401 ? " First enter your key in the window, in this tab." : "";
  main.replaceChildren(node("p", `${error.message}.${hint} `, Object.assign(node("a", "The window"), { href: "." })));
}
